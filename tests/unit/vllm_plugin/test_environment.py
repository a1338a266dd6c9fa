from __future__ import annotations

import pytest

from mooncake_v0.vllm_plugin.environment import choice, seconds


@pytest.mark.parametrize(("text", "value"), [(None, 2.0), ("0", 0.0), ("0.5", 0.5), ("-1", 2.0), ("soon", 2.0)])
def test_a_number_of_seconds_or_the_default(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str | None, value: float
) -> None:
    if text is not None:
        monkeypatch.setenv("MOONCAKE_V0_WAIT_S", text)

    assert seconds("MOONCAKE_V0_WAIT_S", 2.0) == value
    assert (f"MOONCAKE_V0_WAIT_S is {text!r}" in caplog.text) == (text in ("-1", "soon"))


def test_a_choice_that_is_none_is_named_and_the_first_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert choice("MOONCAKE_V0_TRANSPORT", ("auto", "engine")) == "auto"
    monkeypatch.setenv("MOONCAKE_V0_TRANSPORT", "engine")
    assert choice("MOONCAKE_V0_TRANSPORT", ("auto", "engine")) == "engine"
    assert not caplog.text
    monkeypatch.setenv("MOONCAKE_V0_TRANSPORT", "pigeon")

    assert choice("MOONCAKE_V0_TRANSPORT", ("auto", "engine")) == "auto"

    assert "'pigeon', not one of auto, engine" in caplog.text
