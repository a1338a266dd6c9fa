"""Requests that vLLM 0.6.4.post1 will refuse for a reason that the prefill copy hides. Pure functions.

Without these checks prefill would compute the KV of a prompt whose decode then answers 400. A request found here goes
to decode alone, whose refusal the client gets word for word; so a check that is wrong costs time, never an answer.
Sources: vLLM 0.6.4.post1 entrypoints/openai/protocol.py (validators), sampling_params.py (`_verify_args`),
serving_engine.py (`_validate_input`).
"""

from __future__ import annotations

from typing import Any, Callable, Mapping

GREEDY_TEMPERATURE = 1e-5  # sampling_params.py, _SAMPLING_EPS
MAX_LOGPROBS = 20  # vLLM's default for --max-logprobs

WRONG = object()  # a value that pydantic would not take for the field

_TRUE = {"1", "t", "true", "y", "yes", "on"}
_FALSE = {"0", "f", "false", "n", "no", "off"}


def as_bool(value: Any) -> Any:
    """True or False as pydantic's lax mode reads it, None for None, WRONG for anything else."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (int, float)) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    return WRONG


def as_int(value: Any) -> Any:
    """An int as pydantic's lax mode reads it, None for None, WRONG for anything else."""
    if value is None or isinstance(value, int):
        return None if value is None else int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            return WRONG
    return WRONG


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _is_stream_options(value: Any) -> bool:
    known = {"include_usage", "continuous_usage_stats"}
    return isinstance(value, dict) and set(value) <= known and all(as_bool(v) is not WRONG for v in value.values())


def _is_response_format(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") in ("text", "json_object", "json_schema")


def _is_choice(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


# fields that the copy drops and that need more than an int or a bool: what they must be, if not null
_SHAPES: dict[str, Callable[[Any], bool]] = {
    "stream_options": _is_stream_options,
    "response_format": _is_response_format,
    "guided_json": lambda value: isinstance(value, (str, dict)),
    "guided_regex": _is_text,
    "guided_choice": _is_choice,
    "guided_grammar": _is_text,
    "guided_decoding_backend": _is_text,
    "guided_whitespace_pattern": _is_text,
    "length_penalty": _is_number,
    "request_id": _is_text,
}
_INTS = ("n", "best_of", "max_tokens", "max_completion_tokens", "min_tokens", "top_logprobs", "prompt_logprobs")
_BOOLS = ("stream", "echo", "use_beam_search")
_NOT_NULL = ("min_tokens", "use_beam_search", "length_penalty", "request_id")
_CHAT_ONLY = ("max_completion_tokens", "top_logprobs", "request_id")


def in_vain(fields: Mapping[str, Any], *, chat: bool) -> bool:
    """Whether vLLM refuses this request for a field that the prefill copy drops or changes."""
    return (
        _wrong_shape(fields, chat=chat)
        or _wrong_lengths(fields, chat=chat)
        or _wrong_sequences(fields)
        or _wrong_logprobs(fields, chat=chat)
        or _wrong_combination(fields)
    )


def _wrong_shape(fields: Mapping[str, Any], *, chat: bool) -> bool:
    not_null = _NOT_NULL + (("echo",) if chat else ("n",))
    logprobs = fields.get("logprobs")
    return (
        any(as_int(fields.get(name)) is WRONG for name in _INTS)
        or any(as_bool(fields.get(name)) is WRONG for name in _BOOLS)
        or (as_bool(logprobs) if chat else as_int(logprobs)) is WRONG
        or any(name in fields and fields[name] is None for name in not_null)
        or any(fields.get(name) is not None and not fits(fields[name]) for name, fits in _SHAPES.items())
        or (not chat and any(name in fields for name in _CHAT_ONLY))
    )


def answer_tokens(fields: Mapping[str, Any], *, chat: bool) -> int:
    """Tokens of the answer that the context must hold, at least one; call after `in_vain` has found nothing."""
    if chat:
        return max(1, as_int(fields.get("max_completion_tokens")) or as_int(fields.get("max_tokens")) or 1)
    return max(1, int(as_int(fields.get("max_tokens", 16)) or 0))


def _wrong_lengths(fields: Mapping[str, Any], *, chat: bool) -> bool:
    """max_tokens below 1 (0 is for echo), min_tokens outside 0..max_tokens, null where decode would fail later."""
    max_tokens = as_int(fields.get("max_tokens"))
    if chat:
        limit = as_int(fields.get("max_completion_tokens")) or max_tokens
    else:
        # null passes the schema, fills the context and then fails an assertion (serving_completion.py)
        if "max_tokens" in fields and max_tokens is None:
            return True
        limit = 16 if max_tokens is None else max_tokens
        if limit == 0 and as_bool(fields.get("echo")):
            limit = 1
    if limit is not None and limit < 1:
        return True
    min_tokens = as_int(fields.get("min_tokens", 0))
    return bool(min_tokens < 0 or (limit is not None and min_tokens > limit))


def _wrong_sequences(fields: Mapping[str, Any]) -> bool:
    """n below 1; best_of below n, or other than n with stream; several sequences of a greedy request."""
    n = as_int(fields.get("n", 1))
    n = 1 if n is None else n
    best_of = as_int(fields.get("best_of"))
    if n < 1 or (best_of is not None and best_of < n):
        return True
    if best_of is not None and best_of != n and as_bool(fields.get("stream")):
        return True
    temperature = fields.get("temperature")
    greedy = isinstance(temperature, (int, float)) and temperature < GREEDY_TEMPERATURE
    return greedy and max(n, best_of or 1) > 1 and not as_bool(fields.get("use_beam_search"))


def _wrong_logprobs(fields: Mapping[str, Any], *, chat: bool) -> bool:
    """Negative or above the limit; top_logprobs without logprobs; prompt_logprobs of a stream."""
    top = as_int(fields.get("top_logprobs" if chat else "logprobs"))
    prompt = as_int(fields.get("prompt_logprobs"))
    if any(count is not None and not 0 <= count <= MAX_LOGPROBS for count in (top, prompt)):
        return True
    if chat and top is not None and not fields.get("logprobs"):
        return True
    return bool(prompt and fields.get("stream"))


def _wrong_combination(fields: Mapping[str, Any]) -> bool:
    """stream_options without stream; more than one kind of guided decoding."""
    if fields.get("stream_options") and not fields.get("stream"):
        return True
    return sum(fields.get(name) is not None for name in ("guided_json", "guided_regex", "guided_choice")) > 1


def too_long(fields: Mapping[str, Any], *, chat: bool, limit: int) -> bool:
    """Whether prompt and answer cannot fit a context of `limit` tokens (0: not known); exact for token ids."""
    if limit <= 0:
        return False
    answer = answer_tokens(fields, chat=chat)
    if answer >= limit:
        return True
    prompt = fields.get("prompt")
    if chat or not isinstance(prompt, list) or fields.get("truncate_prompt_tokens") is not None:
        return False
    prompts = [prompt] if prompt and isinstance(prompt[0], int) else [one for one in prompt if isinstance(one, list)]
    return any(len(one) + answer > limit for one in prompts)
