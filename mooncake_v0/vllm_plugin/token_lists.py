"""Spares the server half a second for every hundred thousand token ids of a prompt that is given as ids.

vLLM decodes such a prompt to text before it is queued (entrypoints/openai/serving_engine.py,
_normalize_prompt_tokens_to_input), and transformers 4.46 then asks of each id whether it is a tensor of one of five
frameworks (utils/generic.py, to_py_obj): most of decode's time to first token for a long prompt, and meanwhile the server
writes no one's tokens. A list of whole numbers is what it would become. Called only where a KV transfer is configured.
"""

from __future__ import annotations

from typing import Any, Callable

from mooncake_v0.vllm_plugin.wrapping import wrap_once


def pass_token_lists() -> None:
    """Wrap the name under which tokenizers call to_py_obj; safe to call again."""
    from transformers import tokenization_utils_base

    wrap_once(tokenization_utils_base, "to_py_obj", _as_they_are)


def _as_they_are(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def to_py_obj(obj: Any) -> Any:
        if type(obj) is list and set(map(type, obj)) <= {int}:
            return obj.copy()
        return original(obj)

    return to_py_obj
