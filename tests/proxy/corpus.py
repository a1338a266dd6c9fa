"""Request bodies of every kind that vLLM 0.6.4.post1 knows, good and bad, each with a name."""

from __future__ import annotations

from typing import Any

from mooncake_v0.proxy.prefill_request import CHAT, COMPLETIONS

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

COMPLETION_FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "max_tokens": {"max_tokens": 20},
    "max_tokens zero": {"max_tokens": 0},
    "max_tokens zero with echo": {"max_tokens": 0, "echo": True},
    "max_tokens null": {"max_tokens": None},
    "max_tokens negative": {"max_tokens": -1},
    "max_tokens text": {"max_tokens": "12"},
    "max_tokens word": {"max_tokens": "many"},
    "max_tokens half": {"max_tokens": 1.5},
    "max_completion_tokens": {"max_completion_tokens": 5},
    "min_tokens": {"min_tokens": 10, "max_tokens": 20},
    "min_tokens above": {"min_tokens": 30, "max_tokens": 20},
    "min_tokens above the default": {"min_tokens": 17},
    "min_tokens negative": {"min_tokens": -1},
    "min_tokens null": {"min_tokens": None},
    "stream": {"stream": True},
    "stream with usage": {"stream": True, "stream_options": {"include_usage": True}},
    "stream with continuous usage": {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    "stream options without stream": {"stream_options": {"include_usage": True}},
    "stream options empty": {"stream_options": {}},
    "stream options unknown": {"stream": True, "stream_options": {"more": 1}},
    "stream word": {"stream": "perhaps"},
    "n": {"n": 3},
    "n text": {"n": "2"},
    "n zero": {"n": 0},
    "n null": {"n": None},
    "n greedy": {"n": 2, "temperature": 0},
    "best_of": {"n": 2, "best_of": 4},
    "best_of below n": {"n": 3, "best_of": 2},
    "best_of streamed": {"n": 1, "best_of": 2, "stream": True},
    "best_of equal streamed": {"n": 2, "best_of": 2, "stream": True},
    "best_of greedy": {"best_of": 2, "temperature": 0},
    "beam search": {"use_beam_search": True, "n": 2, "temperature": 0},
    "logprobs": {"logprobs": 5},
    "logprobs zero": {"logprobs": 0},
    "logprobs negative": {"logprobs": -1},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "prompt_logprobs streamed": {"prompt_logprobs": 2, "stream": True},
    "prompt_logprobs negative": {"prompt_logprobs": -2},
    "echo": {"echo": True},
    "echo with logprobs": {"echo": True, "logprobs": 1},
    "stop": {"stop": ["a", "b"], "include_stop_str_in_output": True},
    "stop empty text": {"stop": ""},
    "stop_token_ids": {"stop_token_ids": [1, 2]},
    "temperature negative": {"temperature": -1},
    "sampling": {"temperature": 0.3, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "penalty out of range": {"presence_penalty": 5},
    "seed": {"seed": 42},
    "seed too big": {"seed": 2**70},
    "logit_bias": {"logit_bias": {"5": 1.5}},
    "allowed_token_ids": {"allowed_token_ids": [1, 2, 3]},
    "guided_json": {"guided_json": SCHEMA},
    "guided_choice": {"guided_choice": ["yes", "no"]},
    "guided_choice of numbers": {"guided_choice": [1, 2]},
    "guided twice": {"guided_regex": "a+", "guided_choice": ["a"]},
    "guided backend": {"guided_regex": "a+", "guided_decoding_backend": "outlines"},
    "response_format": {"response_format": {"type": "json_object"}},
    "response_format unknown": {"response_format": {"type": "yaml"}},
    "truncate": {"truncate_prompt_tokens": 4},
    "user and suffix": {"user": "u", "suffix": None},
    "priority": {"priority": 0},
    "unknown field": {"kv_transfer_params": {}},
    "ignore_eos": {"ignore_eos": True, "skip_special_tokens": False, "spaces_between_special_tokens": False},
}
PROMPTS: dict[str, Any] = {
    "list of texts": ["one", "two"],
    "token ids": [1, 2, 3],
    "lists of token ids": [[1, 2], [3]],
    "no prompt": None,
    "a number": 5,
}
CHAT_FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "max_tokens": {"max_tokens": 20},
    "max_tokens null": {"max_tokens": None},
    "max_tokens zero": {"max_tokens": 0},
    "max_completion_tokens": {"max_completion_tokens": 500},
    "max_completion_tokens zero": {"max_completion_tokens": 0},
    "max_completion_tokens wins": {"max_completion_tokens": 5, "max_tokens": 50, "min_tokens": 4},
    "max_completion_tokens below min_tokens": {"max_completion_tokens": 5, "max_tokens": 50, "min_tokens": 9},
    "min_tokens alone": {"min_tokens": 9},
    "n null": {"n": None},
    "n": {"n": 2},
    "n greedy": {"n": 2, "temperature": 0},
    "best_of below n": {"n": 2, "best_of": 1},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "logprobs off": {"logprobs": False},
    "top_logprobs alone": {"top_logprobs": 3},
    "top_logprobs zero alone": {"top_logprobs": 0},
    "top_logprobs negative": {"logprobs": True, "top_logprobs": -1},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "prompt_logprobs streamed": {"prompt_logprobs": 1, "stream": True},
    "echo": {"echo": True, "add_generation_prompt": False},
    "echo null": {"echo": None},
    "continue": {"continue_final_message": True, "add_generation_prompt": False},
    "continue and generate": {"continue_final_message": True, "add_generation_prompt": True},
    "tools": {"tools": [TOOL]},
    "tools named": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
    "tools none": {"tools": [TOOL], "tool_choice": "none"},
    "tools required": {"tools": [TOOL], "tool_choice": "required"},
    "tool_choice without tools": {"tool_choice": "auto"},
    "tool strict": {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]},  # type: ignore[dict-item]
    "stream with usage": {"stream": True, "stream_options": {"include_usage": True}},
    "stream options without stream": {"stream_options": {"include_usage": True}},
    "stream options null": {"stream_options": None},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    "guided twice": {"guided_json": SCHEMA, "guided_choice": ["a"]},
    "guided grammar": {"guided_grammar": "root ::= 'a'", "guided_whitespace_pattern": " "},
    "template": {"chat_template": "{{ messages[0]['content'] }}", "chat_template_kwargs": {"a": 1}},
    "documents": {"documents": [{"title": "t", "text": "x"}]},
    "request_id": {"request_id": "mine"},
    "request_id null": {"request_id": None},
    "parallel_tool_calls": {"parallel_tool_calls": True},
    "beam search": {"use_beam_search": True, "n": 2, "max_tokens": 4},
    "length_penalty": {"length_penalty": 0.5},
    "length_penalty null": {"length_penalty": None},
    "metadata": {"metadata": {}},
    "store": {"store": True},
    "reasoning_effort": {"reasoning_effort": "low"},
}
MESSAGES: dict[str, Any] = {
    "system and user": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
    "list content": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "image": [{"role": "user", "content": [{"type": "text", "text": "hi"}, IMAGE]}],
    "tool answer": [
        {"role": "user", "content": "u"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ],
    "none": [],
    "not a list": 5,
    "no role": [{"content": "x"}],
}


def corpus() -> dict[str, tuple[str, dict[str, Any]]]:
    """Name → (path, fields)."""
    bodies: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, fields in COMPLETION_FIELDS.items():
        bodies[f"completions, {name}"] = (COMPLETIONS, {"model": "tiny", "prompt": "hello", **fields})
    for name, prompt in PROMPTS.items():
        bodies[f"completions, prompt: {name}"] = (COMPLETIONS, {"model": "tiny", "prompt": prompt})
    for name, fields in CHAT_FIELDS.items():
        messages = [{"role": "user", "content": "hello"}]
        bodies[f"chat, {name}"] = (CHAT, {"model": "tiny", "messages": messages, **fields})
    for name, messages in MESSAGES.items():
        bodies[f"chat, messages: {name}"] = (CHAT, {"model": "tiny", "messages": messages})
    return bodies
