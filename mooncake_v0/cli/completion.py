"""`mooncake-v0 completion`: the shell's completion script, made by click."""

from __future__ import annotations

import click

from mooncake_v0.errors import CouldNotCheckError

VARIABLE = "_MOONCAKE_V0_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    Examples:
      mooncake-v0 completion bash > /etc/bash_completion.d/mooncake-v0
      mooncake-v0 completion zsh > ~/.zfunc/_mooncake-v0
      mooncake-v0 completion fish > ~/.config/fish/completions/mooncake-v0.fish
    """
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    assert made is not None
    try:
        click.echo(made(click.get_current_context().find_root().command, {}, "mooncake-v0", VARIABLE).source())
    except RuntimeError as error:  # bash is too old, or not there
        raise CouldNotCheckError(str(error), fix="install bash 4.4 or later") from error
