"""`mooncake-v0 completion`: the shell's completion script, made by click; for bash and fish with words as they are."""

from __future__ import annotations

import os
import re

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    add_completion_class,
    get_completion_class,
    split_arg_string,
)

from mooncake_v0.errors import CouldNotCheckError

VARIABLE = "_MOONCAKE_V0_COMPLETE"
_BASH = """\
%(complete_func)s() {
    local type value
    COMPREPLY=()
    while IFS=',' read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("$value") ;;
        esac
    done < <(env COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" COMP_WORDBREAKS="$COMP_WORDBREAKS" \\
        %(complete_var)s=bash_complete "$1")
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class WholeWords(BashComplete):
    """bash breaks words at colons, which URLs and keys are full of: the line itself is read instead of its words.

    What it gets back replaces only the part after the last break, and is quoted.
    """

    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        if "COMP_LINE" not in os.environ:
            return super().get_completion_args()  # a script that click made
        line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
        words = split_arg_string(line)[1:]
        incomplete = words.pop() if words and not line[-1].isspace() else ""
        breaks = [incomplete.rfind(c) + 1 for c in ":=" if c in os.environ.get("COMP_WORDBREAKS", "")]
        self._kept = incomplete[: max(breaks, default=0)]
        return words, incomplete

    def format_completion(self, item: CompletionItem) -> str:
        kept: str = getattr(self, "_kept", "")
        value = item.value[len(kept) :] if item.value.startswith(kept) else item.value
        quoted = re.sub(r"([^A-Za-z0-9_./:@%+=,~-])", r"\\\1", value)
        return f"{item.type},{quoted}"


class WholeLines(FishComplete):
    """click's script cuts a word, or its description, at its first comma."""

    source_template = FishComplete.source_template.replace('string split ","', 'string split --max 1 ","')


add_completion_class(WholeWords, "bash")
add_completion_class(WholeLines, "fish")


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
    made = get_completion_class(shell)
    assert made is not None
    try:
        click.echo(made(click.get_current_context().find_root().command, {}, "mooncake-v0", VARIABLE).source())
    except RuntimeError as error:  # bash is too old, or not there
        raise CouldNotCheckError(str(error), fix="install bash 4.4 or later") from error
