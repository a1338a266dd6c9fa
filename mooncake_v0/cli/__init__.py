"""The command line: arguments → objects → exit code. The only part that prints.

Each subcommand is a module of this package, imported only when it is called, so that `validate` starts without
quart, zmq or torch. Exit codes: 0 good, 1 findings or failure, 2 could not check or wrong usage.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import click

from mooncake_v0 import ENGINE_VERSIONS, VLLM_VERSION, __version__
from mooncake_v0.errors import CouldNotCheckError, MooncakeV0Error

# name -> (module, attribute, one line for the list of commands)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "bench": ("mooncake_v0.cli.bench", "bench", "Measure the transfer and the latency of a pair."),
    "completion": ("mooncake_v0.cli.completion", "completion", "Print the completion script of a shell."),
    "demo": ("mooncake_v0.cli.demo", "demo", "Run a whole pair on this host, ask it, show what moved."),
    "metadata": ("mooncake_v0.cli.metadata", "metadata", "Serve, inspect and clean the metadata store."),
    "migrate": ("mooncake_v0.cli.migrate", "migrate", "Report what it takes to move a V0 deployment to vLLM V1."),
    "proxy": ("mooncake_v0.cli.proxy", "proxy", "Serve the OpenAI API in front of prefill and decode instances."),
    "doctor": ("mooncake_v0.cli.doctor", "doctor", "Find what is wrong on this host, and the command that fixes it."),
    "launch": ("mooncake_v0.cli.launch", "launch", "Check, then start prefill, decode or a whole pair."),
    "status": ("mooncake_v0.cli.status", "status", "Show both sides of a running pair, live."),
    "explain": ("mooncake_v0.cli.explain", "explain", "Explain a finding by its name, or list all."),
    "ports": ("mooncake_v0.cli.ports", "ports", "Show every port of a pair and its firewall rules."),
    "schema": ("mooncake_v0.cli.schema", "schema", "Print the JSON Schema of mooncake.json."),
    "size": ("mooncake_v0.cli.size", "size", "Compute kv_buffer_size for a model and its prompts."),
    "validate": ("mooncake_v0.cli.validate", "validate", "Check mooncake.json, launch commands and the host."),
}


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they are called, and listed without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # the reader of our output (head, less) has gone; nobody is left to tell, and click would say 1
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise click.exceptions.Exit(141) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, COMMANDS[name][2]) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    import importlib.metadata
    import platform

    click.echo(f"mooncake-v0 {__version__}")
    for package, pins in (("vllm", (VLLM_VERSION,)), ("mooncake-transfer-engine", ENGINE_VERSIONS)):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        click.echo(f"{package} {found} (pinned: {' or '.join(pins)})")
    click.echo(f"Python {platform.python_version()}")
    ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and the pins found.",
)
@click.option("--debug", is_flag=True, help="Show tracebacks and debug logs.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Run pinned vLLM V0 prefill/decode pairs over the Mooncake transfer engine."""
    ctx.obj = {"debug": debug}
    if os.environ.get("NO_COLOR"):
        ctx.color = False  # of all commands' output; without NO_COLOR only a terminal gets colour


def main(argv: list[str] | None = None) -> Any:
    """Entry point of the console script: turns our errors into one clear message and an exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    debug = "--debug" in arguments[:1]
    if "_MOONCAKE_V0_COMPLETE" in os.environ:
        importlib.import_module("mooncake_v0.cli.completion")  # registers our way with bash
    try:
        code = cli.main(args=arguments, prog_name="mooncake-v0", standalone_mode=False)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        code = 130
    except MooncakeV0Error as error:
        if debug:
            raise
        click.echo(f"error: {error.what}", err=True)
        if error.fix:
            click.echo(f"  fix: {error.fix}", err=True)
        code = 2 if isinstance(error, CouldNotCheckError) else 1
    sys.exit(code if isinstance(code, int) else 0)
