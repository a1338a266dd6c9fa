"""Wrong input to `mooncake-v0 bench`: one clear error, the right exit code, and nothing started."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from mooncake_v0.cli import main

TRANSFER = ["bench", "transfer", "--model", "tiny"]
SERVE = ["bench", "serve", "--proxy", "http://127.0.0.1:1", "--plain", "http://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*TRANSFER, "--model", "qwen9"], "no model shape 'qwen9'"),
        ([*TRANSFER, "--prompt-tokens", "128,x"], "'x' is not a number above 0"),
        ([*TRANSFER, "--prompt-tokens", "0"], "'0' is not a number above 0"),
        ([*TRANSFER, "--kv-bytes", "64Mib,lots"], "'lots' is not a size"),
        ([*TRANSFER, "--kv-bytes", "1MiB", "--prompt-tokens", "128"], "not both"),
        ([*TRANSFER, "--transport", "carrier-pigeon"], "'carrier-pigeon' is not one of"),
        ([*TRANSFER, "--device", "tpu"], "'tpu' is neither cpu nor cuda"),
        ([*TRANSFER, "--json", "/nonexistent/t.json"], "the folder /nonexistent does not exist"),
        (["bench", "transfer", "--model", "qwen2.5-72b", "--kv-bytes", "1TiB"], "do not fit four times"),
        ([*TRANSFER, "--prompt-tokens", "16", "--peer-python", "/nonexistent/python"], "is not a program"),
        (["bench", "serve"], "give --proxy URL and --plain URL of running servers, or --start MODEL"),
        (["bench", "serve", "--proxy", "http://127.0.0.1:1"], "or --start MODEL"),
        ([*SERVE, "--start", "tiny"], "or --start MODEL"),
        ([*SERVE, "--rates", "fast"], "'fast' is not a number above 0"),
        ([*SERVE, "--html", "/"], "it is a folder"),
        (SERVE, "http://127.0.0.1:1 does not answer"),
        ([*SERVE, "--config", "/nonexistent/mooncake.json"], "/nonexistent/mooncake.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_input_is_one_error_with_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)

    shown = " ".join(capsys.readouterr().err.split())
    assert (stopped.value.code, message in shown, "Traceback" in shown) == (2, True, False), shown


def test_a_host_without_matplotlib_is_told_before_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else object())

    with pytest.raises(SystemExit) as stopped:
        main([*TRANSFER, "--png", str(tmp_path / "t.png")])

    assert stopped.value.code == 2
    assert 'pip install "mooncake-v0[bench]"' in capsys.readouterr().err


def test_a_server_that_is_no_openai_server_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(SystemExit) as stopped:
            main(["bench", "serve", "--proxy", url, "--plain", url, "--timeout", "1"])

    assert stopped.value.code == 2
    assert f"{url} does not answer: TimeoutError" in capsys.readouterr().err
