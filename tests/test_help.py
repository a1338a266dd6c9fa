"""The help texts: they read well at 80 columns, and docs/commands.md is their snapshot (tests/test_docs.py compares)."""

from __future__ import annotations

import os
import subprocess
import sys

import click
import pytest
from click.shell_completion import ShellComplete

from mooncake_v0 import ENGINE_VERSIONS, VLLM_VERSION, __version__
from mooncake_v0.cli import COMMANDS, cli, main
from tests.reference import commands, help_text

HELP = [pytest.param(path, command, id=path) for path, command in commands()]


@pytest.mark.parametrize(("path", "command"), HELP)
def test_no_line_is_longer_than_80_columns(path: str, command: click.Command) -> None:
    assert [line for line in help_text(path, command).splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(("path", "command"), [p for p in HELP if not isinstance(p.values[1], click.Group)])
def test_every_command_has_an_example_of_itself(path: str, command: click.Command) -> None:
    text = help_text(path, command)
    assert "Example" in text
    assert text.count(path) >= 2  # the usage line, and an example


@pytest.mark.parametrize(("path", "command"), HELP)
def test_the_first_line_is_one_sentence(path: str, command: click.Command) -> None:
    first = (command.get_short_help_str(1000) or "").strip()
    assert first.endswith((".", "…"))


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mooncake_v0", *arguments]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60)


def test_the_terminal_gets_the_same_text() -> None:
    shown = run("launch", "--help", COLUMNS="80").stdout
    command = next(param.values[1] for param in HELP if param.id == "mooncake-v0 launch")
    assert isinstance(command, click.Command)
    assert [line.rstrip() for line in shown.splitlines()] == help_text("mooncake-v0 launch", command).splitlines()


def test_the_version_names_the_pins() -> None:
    lines = run("--version").stdout.splitlines()
    assert lines[0] == f"mooncake-v0 {__version__}"
    assert lines[1].endswith(f"(pinned: {VLLM_VERSION})")
    assert lines[2].endswith(f"(pinned: {' or '.join(ENGINE_VERSIONS)})")


def test_bash_completes_commands_and_options() -> None:
    first = run(COMP_WORDS="mooncake-v0 va", COMP_CWORD="1", _MOONCAKE_V0_COMPLETE="bash_complete")
    assert first.stdout.split() == ["plain,validate"]
    second = run(COMP_WORDS="mooncake-v0 doctor --bun", COMP_CWORD="2", _MOONCAKE_V0_COMPLETE="bash_complete")
    assert second.stdout.split() == ["plain,--bundle"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_is_printed(shell: str) -> None:
    done = run("completion", shell)
    assert done.returncode == 0
    assert "_MOONCAKE_V0_COMPLETE" in done.stdout


def test_bash_takes_its_completion_script() -> None:
    script = run("completion", "bash").stdout
    done = subprocess.run(
        ["bash", "-c", script + "\ncomplete -p mooncake-v0"], capture_output=True, text=True, timeout=30
    )
    assert "_mooncake_v0_completion" in done.stdout


@pytest.mark.parametrize(("path", "command"), HELP)
def test_every_option_is_completed(path: str, command: click.Command) -> None:
    complete = ShellComplete(cli, {}, "mooncake-v0", "_MOONCAKE_V0_COMPLETE")
    offered = {item.value for item in complete.get_completions(path.split()[1:], "--")}
    options = [param for param in command.params if isinstance(param, click.Option) and not param.hidden]
    assert {name for option in options for name in option.opts if name.startswith("--")} <= offered
    if isinstance(command, click.Group):
        offered = {item.value for item in complete.get_completions(path.split()[1:], "")}
        assert offered == set(command.list_commands(click.Context(command)))


@pytest.mark.parametrize(("path", "command"), HELP)
def test_wrong_usage_of_every_command_is_one_message_with_exit_code_2(
    path: str, command: click.Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*path.split()[1:], "--no-such-option"])
    shown = capsys.readouterr()
    assert (stopped.value.code, shown.out) == (2, "")
    assert "--no-such-option" in shown.err
    assert f"Try '{path} --help' for help." in shown.err


def test_an_unknown_command_is_one_message(tmp_path: object) -> None:
    done = run("lunch")
    assert done.returncode == 2
    assert "lunch" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_command_starts_without_the_heavy_packages() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'vllm', 'mooncake'):\n    sys.modules[name] = None\n"
        "from mooncake_v0.cli import COMMANDS, cli\n"
        "for name in COMMANDS:\n    cli([name, '--help'], standalone_mode=False)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.count("Usage: ")) == (0, len(COMMANDS)), done.stderr
