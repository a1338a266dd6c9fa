"""From the client's bytes to what the prefill instance must be sent, for vLLM 0.6.4.post1. Pure functions.

Decode always gets the client's own bytes; prefill gets a copy that makes the same KV and nothing else: one token, one
sequence, no log probabilities, no guided decoding (its state machine would be compiled twice). The request models of
this vLLM forbid unknown fields (`extra="forbid"`, entrypoints/openai/protocol.py), so nothing is added that the
endpoint's schema lacks; `max_completion_tokens` for one exists on chat only.

Three kinds of request skip prefill and go to decode alone:
- the connector does not serve them from KV (prompt log probabilities, multimodal parts, beam search);
- prefill would be asked in vain, because vLLM will answer 400 for a field that the copy hides (`prefill_checks`); the
  refusal is then vLLM's own;
- the prompt is too short to be worth it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Callable, Mapping

from mooncake_v0.fast_json import loads_to_rewrite
from mooncake_v0.proxy import prefill_checks

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

# fields that shape the answer but not the prompt's KV
DROPPED = frozenset(
    {
        "n",
        "best_of",
        "stream",
        "stream_options",
        "min_tokens",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "prompt_logprobs",
        "echo",
        "use_beam_search",
        "length_penalty",
        "response_format",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "guided_decoding_backend",
        "guided_whitespace_pattern",
        "request_id",
    }
)
# fields of the prompt: two requests that agree on these have the same KV
PROMPT_FIELDS = (
    "model",
    "prompt",
    "messages",
    "tools",
    "tool_choice",
    "documents",
    "chat_template",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "truncate_prompt_tokens",
)
BYTES_PER_TOKEN = 4  # a usual figure for English text with the vocabularies of today; only ever an estimate


@dataclass(frozen=True)
class RequestPlan:
    """What to do with one request.

    prefill_body:    the copy for prefill; None: decode alone
    reason:          why decode alone: "", "invalid", "not_from_kv", "short_prompt"
    stream:          the client asked for server-sent events
    prompt_tokens:   exact for token ids, an estimate for text
    prompt_key:      equal for requests with the same prompt KV; empty where prefill is skipped
    tokenize_body:   what to ask /tokenize to learn whether the prompt fits the context; None: clear without asking
    one_prompt:      there is one, not a list of them
    answer_tokens:   tokens of the answer that the context must have room for; used with tokenize_body
    """

    prefill_body: bytes | None
    reason: str
    stream: bool
    prompt_tokens: int
    prompt_key: bytes = b""
    tokenize_body: bytes | None = None
    answer_tokens: int = 0
    one_prompt: bool = False


def plan_request(
    path: str, content_type: str, body: bytes, *, max_model_len: int = 0, min_prefill_tokens: int = 0
) -> RequestPlan:
    """Decide for one request to /v1/completions or /v1/chat/completions; never raises for a bad body.

    max_model_len: the instances' context length in tokens, 0 when it is not known.
    """
    found = _json_object(content_type, body)
    if found is None:
        return RequestPlan(None, "invalid", stream=False, prompt_tokens=0)
    fields, dumps = found
    chat = path == CHAT
    stream = prefill_checks.as_bool(fields.get("stream")) is True
    tokens = estimate_tokens(fields, len(body))
    if prefill_checks.in_vain(fields, chat=chat) or prefill_checks.too_long(fields, chat=chat, limit=max_model_len):
        return RequestPlan(None, "invalid", stream, tokens)
    if not_from_kv(fields, chat=chat):
        return RequestPlan(None, "not_from_kv", stream, tokens)
    if tokens < min_prefill_tokens:
        return RequestPlan(None, "short_prompt", stream, tokens)
    question, answer_tokens = _tokenize_question(fields, chat=chat, size=len(body), limit=max_model_len)
    return RequestPlan(
        prefill_body=dumps(_prefill_copy(fields)),
        reason="",
        stream=stream,
        prompt_tokens=tokens,
        prompt_key=_digest(dumps([fields.get(name) for name in PROMPT_FIELDS])),
        tokenize_body=None if question is None else dumps(question),
        answer_tokens=answer_tokens,
        one_prompt=chat or _is_one_prompt(fields.get("prompt")),
    )


def _is_one_prompt(prompt: Any) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], int))


def _json_object(content_type: str, body: bytes) -> tuple[dict[str, Any], Callable[[Any], bytes]] | None:
    """The body as FastAPI would read it: a JSON object under a JSON content type, or no content type at all.

    And what writes JSON of its parts.
    """
    main = content_type.partition(";")[0].strip().lower()
    if main and not (main.startswith("application/") and (main == "application/json" or main.endswith("+json"))):
        return None
    try:
        value, dumps = loads_to_rewrite(body)
    except (ValueError, RecursionError):
        return None
    return (value, dumps) if isinstance(value, dict) else None


def _prefill_copy(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What is for prefill: the prompt's fields and the sampling fields as they are, one token, not streamed.

    The KV of the prompt does not depend on n or best_of, and a look-up does not remove it, so one sequence is enough.
    """
    copy = {name: value for name, value in fields.items() if name not in DROPPED}
    copy["max_tokens"] = 1
    return copy


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def not_from_kv(fields: Mapping[str, Any], *, chat: bool) -> bool:
    """Whether decode computes this request itself, whatever prefill sends.

    Prompt log probabilities need the hidden state of every prompt position and only the last one is transferred; echo
    asks for them when log probabilities are on (chat: always, protocol.py `to_sampling_params`). Beam search submits
    every step as a prompt of its own.
    """
    if fields.get("prompt_logprobs") is not None or prefill_checks.as_bool(fields.get("use_beam_search")):
        return True
    if prefill_checks.as_bool(fields.get("echo")) and (chat or fields.get("logprobs") is not None):
        return True
    messages = fields.get("messages")
    return chat and isinstance(messages, list) and any(_is_multimodal(message) for message in messages)


def _is_multimodal(message: Any) -> bool:
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return False
    return any(isinstance(part, dict) and part.get("type") not in ("text", "refusal") for part in content)


def estimate_tokens(fields: Mapping[str, Any], body_bytes: int) -> int:
    """Prompt tokens: exact for token ids, bytes / 4 for text. A list of prompts counts as their sum."""
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        return len(prompt) // BYTES_PER_TOKEN + 1
    if isinstance(prompt, list) and prompt:
        if isinstance(prompt[0], int):
            return len(prompt)
        return sum(len(one) if isinstance(one, list) else len(str(one)) // BYTES_PER_TOKEN + 1 for one in prompt)
    return body_bytes // BYTES_PER_TOKEN + 1


def _tokenize_question(
    fields: Mapping[str, Any], *, chat: bool, size: int, limit: int
) -> tuple[dict[str, Any] | None, int]:
    """What to ask /tokenize of a text prompt that may or may not fit the context; None when that is clear.

    A token of a byte-level vocabulary is at least one byte, so a text of few bytes fits for certain; and hardly any
    text has more than six bytes a token, so far below that it may be tried.
    """
    prompt = fields.get("prompt")
    answer = prefill_checks.answer_tokens(fields, chat=chat)
    if limit <= 0 or (not chat and not isinstance(prompt, str)) or fields.get("truncate_prompt_tokens") is not None:
        return None, answer
    text_bytes = size if chat or not isinstance(prompt, str) else len(prompt.encode("utf-8", "surrogatepass"))
    if text_bytes + answer + 16 <= limit or text_bytes / 6 + answer <= limit / 2:
        return None, answer
    names = ("messages", "add_generation_prompt", "continue_final_message") if chat else ("prompt",)
    question = {name: fields[name] for name in ("model", "add_special_tokens", *names) if name in fields}
    return question, answer
