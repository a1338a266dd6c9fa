"""The real request models of vLLM 0.6.4.post1 judge what the proxy sends to prefill."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from mooncake_v0.proxy.prefill_request import CHAT, COMPLETIONS, RequestPlan, plan_request
from tests.proxy.corpus import corpus

pytestmark = pytest.mark.pin

protocol = pytest.importorskip("vllm.entrypoints.openai.protocol", reason="needs vLLM 0.6.4.post1")

BODIES = corpus()
MAX_MODEL_LEN = 4096
DEFAULT_MAX_TOKENS = 4000


def accepts(path: str, fields: dict[str, Any]) -> bool:
    """Whether the server takes a body: its schema, its validators, and the sampling parameters made of it."""
    model = {COMPLETIONS: protocol.CompletionRequest, CHAT: protocol.ChatCompletionRequest}[path]
    try:
        request = model.model_validate(copy.deepcopy(fields))
        if request.use_beam_search:
            request.to_beam_search_params(DEFAULT_MAX_TOKENS)
        else:
            request.to_sampling_params(DEFAULT_MAX_TOKENS)
        # serving_completion.py asserts this when it writes its answer
        assert path == CHAT or request.max_tokens is not None
    except (ValueError, TypeError, AssertionError):
        return False
    return True


def plan_of(name: str) -> RequestPlan:
    path, fields = BODIES[name]
    return plan_request(path, "application/json", json.dumps(fields).encode(), max_model_len=MAX_MODEL_LEN)


ACCEPTED = [name for name, (path, fields) in BODIES.items() if accepts(path, fields)]
REFUSED = [name for name in BODIES if name not in ACCEPTED]


def test_corpus_is_large_and_has_both_kinds() -> None:
    assert len(ACCEPTED) >= 60
    assert len(REFUSED) >= 30


@pytest.mark.parametrize("name", ACCEPTED)
def test_prefill_copy_of_an_accepted_body_is_accepted_and_asks_for_one_token(name: str) -> None:
    path, fields = BODIES[name]
    plan = plan_of(name)

    if plan.prefill_body is None:  # not served from KV; "invalid" would be a wrong alarm
        assert plan.reason == "not_from_kv"
        return
    sent = json.loads(plan.prefill_body)
    assert accepts(path, sent)
    assert set(sent) - set(fields) <= {"max_tokens"}
    assert sent["max_tokens"] == 1
    assert not sent.get("stream")
    assert sent.get("n", 1) == 1


@pytest.mark.parametrize("name", REFUSED)
def test_prefill_is_not_asked_in_vain(name: str) -> None:
    path, _ = BODIES[name]
    plan = plan_of(name)

    # what the copy still shows, prefill refuses itself, in the server's own words and without computing anything
    assert plan.prefill_body is None or not accepts(path, json.loads(plan.prefill_body))


PROMPT_FIELDS = ("model", "prompt", "messages", "tools", "tool_choice", "documents", "chat_template")


@pytest.mark.parametrize("name", ACCEPTED)
def test_fields_of_the_prompt_reach_prefill_as_they_are(name: str) -> None:
    _, fields = BODIES[name]
    plan = plan_of(name)
    sent = json.loads(plan.prefill_body or json.dumps(fields))

    assert {key: sent.get(key) for key in PROMPT_FIELDS} == {key: fields.get(key) for key in PROMPT_FIELDS}
