"""Reads shell text (scripts, one-liners, Slurm jobs, env files) into invocations, by its syntax tree; runs nothing.

The grammar is tree-sitter's for bash, which also reads broken text. `ShellReader.walk` follows the text from top to
bottom, keeping variables, arrays, functions and exports, unrolling loops over literal lists, and reads both sides of
every `if`. What only a running shell can know (command substitution, positional parameters, unset variables) stays as
written, as `${NAME}` or `$(...)`, and is reported. Called by `files` and, for `bash -c` and `ssh`, by `commands`.
"""

from __future__ import annotations

import functools
import posixpath
import re
from dataclasses import dataclass, field, replace

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from mooncake_v0.migrate.commands import Scene, read_command
from mooncake_v0.migrate.records import Found, Place, TextFile
from mooncake_v0.migrate.shell_branches import alternatives, first_choice
from mooncake_v0.migrate.shell_words import Words

MAX_DEPTH = 12
MAX_LOOP = 16
MAX_COMMANDS = 2000


@functools.lru_cache(maxsize=1)
def _parser() -> Parser:
    return Parser(Language(tree_sitter_bash.language()))


@dataclass
class ShellState:
    """What a shell remembers while it reads: shared between a script, what it sources and its functions."""

    variables: dict[str, list[str]] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)
    functions: dict[str, tuple[Node, bytes, Place]] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    export_all: bool = False
    commands: int = 0

    def environment(self) -> list[tuple[str, str]]:
        return [(name, " ".join(values)) for name, values in self.variables.items() if name in self.exported]

    def copy(self) -> ShellState:
        """A state of its own; syntax trees are shared."""
        return replace(
            self,
            variables={name: list(values) for name, values in self.variables.items()},
            exported=set(self.exported),
            functions=dict(self.functions),
            called=set(self.called),
        )

    def assign(self, name: str, values: list[str], *, append: bool = False, export: bool = False) -> None:
        old = self.variables.get(name, []) if append else []
        if append and old and len(values) == 1 and len(old) == 1:
            values, old = [old[0] + values[0]], []
        self.variables[name] = [*old, *values]
        if export or self.export_all:
            self.exported.add(name)


class ShellReader:
    """Reads one piece of shell text; see the module docstring."""

    def __init__(self, text: str, place: Place, found: Found, *, scene: Scene, state: ShellState | None = None):
        self.source = text.encode()
        self.place = place
        self.found = found
        self.scene = scene
        self.state = state or _seeded(scene)
        self.words = Words(self.source, self.state.variables, scene.lookup)
        self.depth = 0
        self.choice: dict[int, list[Node]] = {}
        self._attachable = False

    def read(self) -> None:
        """Read all of it, once for each alternative if it serves several roles (see `shell_branches`)."""
        root = _parser().parse(self.source).root_node
        choice = first_choice(root) if self.depth == 0 else None
        if choice is None:
            self._read(root)
            return
        before, scene = self.state.copy(), self.scene
        for alternative in alternatives(choice):
            self.choice = {choice.start_byte: alternative}
            self.state, self.scene = before.copy(), scene
            self.words = Words(self.source, self.state.variables, self.scene.lookup)
            self._read(root)
        self.found.drop_repeated()

    def _read(self, root: Node) -> None:
        """Walk it; functions that nothing calls are read at the end, as they stand."""
        self.walk(root)
        for name in [name for name in self.state.functions if name not in self.state.called]:
            if self.state.functions[name][1] is self.source:
                self._call(name, [])

    def at(self, node: Node) -> Place:
        return Place(self.place.file, self.place.line + node.start_point[0])

    def walk(self, node: Node) -> None:
        if self.depth > MAX_DEPTH or self.state.commands > MAX_COMMANDS:
            self.found.note(self.at(node), self.words.text(node), "nested too deeply or too long to follow")
            return
        if node.start_byte in self.choice and node.type in ("if_statement", "case_statement"):
            for child in self.choice[node.start_byte]:
                self.walk(child)
            return
        handler = getattr(self, "_" + node.type, None)
        if handler is not None:
            handler(node)
            return
        for child in node.named_children:
            self.walk(child)

    def _ERROR(self, node: Node) -> None:
        if _mentions_vllm(self.words.text(node)):
            self.found.note(self.at(node), self.words.text(node), "not valid shell; parts of it may be missing")
        for child in node.named_children:
            self.walk(child)

    def _comment(self, node: Node) -> None:
        pass

    def _variable_assignment(self, node: Node) -> None:
        self._assign(node, export=False)

    def _assign(self, node: Node, *, export: bool) -> None:
        name, values, append = self.words.assignment(node)
        if name:
            self.state.assign(name, values, append=append, export=export)

    def _declaration_command(self, node: Node) -> None:
        export = self.words.text(node).startswith("export") or " -x" in self.words.text(node)[:14]
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._assign(child, export=export)
            elif child.type in ("variable_name", "word") and export:
                self.state.exported.add(self.words.text(child))

    def _function_definition(self, node: Node) -> None:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.state.functions[self.words.text(name)] = (body, self.source, self.place)

    def _for_statement(self, node: Node) -> None:
        name, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        values = [word for child in node.children_by_field_name("value") for word in self.words.value(child)]
        if name is None or body is None:
            return
        if not values or any("$" in value for value in values) or len(values) > MAX_LOOP:
            self.found.note(
                self.at(node), self.words.text(node).split("\n")[0], "loop over a list not known here; read once"
            )
            values = [f"${{{self.words.text(name)}}}"]
        for value in values:
            self.state.assign(self.words.text(name), [value])
            self.walk(body)

    def _redirected_statement(self, node: Node) -> None:
        body = node.child_by_field_name("body")
        target = self._redirect_target(node)
        heredoc = next((child for child in node.named_children if child.type == "heredoc_redirect"), None)
        if heredoc is not None:
            self._heredoc(node, heredoc, target or self._redirect_target(heredoc))
        if body is None or (heredoc is not None and _is_writer(self.words.text(body))):
            return
        if target and body.type == "command" and re.match(r"(?:echo|printf)\b", self.words.text(body)):
            self._written(target, " ".join(self._command_words(body)[1:]), self.at(node))
            return
        self.walk(body)

    def _redirect_target(self, node: Node) -> str:
        for child in node.named_children:
            if child.type == "file_redirect" and not self.words.text(child).lstrip().startswith(("2", "<", "&")):
                destination = child.child_by_field_name("destination")
                if destination is not None:
                    return " ".join(self.words.value(destination))
        return ""

    def _heredoc(self, node: Node, heredoc: Node, target: str) -> None:
        start = next((child for child in heredoc.named_children if child.type == "heredoc_start"), None)
        body = next((child for child in heredoc.named_children if child.type == "heredoc_body"), None)
        if start is None or body is None:
            return
        quoted = self.words.text(start)[:1] in "'\"\\"
        text = self.words.text(body) if quoted else self.words.gaps(body, body.start_byte, body.end_byte)
        command = node.child_by_field_name("body")
        words = self._command_words(command) if command is not None and command.type == "command" else []
        if words[:1] == ["tee"]:
            target = next((word for word in words[1:] if not word.startswith("-")), target)
        if target:
            self._written(target, text, Place(self.place.file, self.place.line + body.start_point[0]))
        elif words and words[0] in ("bash", "sh", "ssh", "sudo"):
            scene = self.scene.on_host(words[1]) if words[0] == "ssh" and len(words) > 1 else self.scene
            self._nested(text, self.at(body), scene)

    def _written(self, path: str, text: str, place: Place) -> None:
        if self.scene.directory and not path.startswith("/"):
            path = posixpath.join(self.scene.directory, path)
        self.found.files.append(TextFile(path, text, place))

    def _command_words(self, node: Node) -> list[str]:
        name = node.child_by_field_name("name")
        words = self.words.value(name.named_children[0]) if name is not None and name.named_children else []
        for child in node.children_by_field_name("argument"):
            # a backslash before a space at the end of a line was meant to continue it
            if not re.fullmatch(r"(?:\\[ \t]+)+", self.words.text(child)):
                words.extend(self.words.value(child))
        return words

    def _command(self, node: Node) -> None:
        self.state.commands += 1
        prefix: list[tuple[str, str]] = []
        for child in node.named_children:
            if child.type == "variable_assignment":
                name, values, _ = self.words.assignment(child)
                prefix.append((name, " ".join(values)))
        words = self._command_words(node)
        if not words or not words[0].strip():
            return
        if words[0].startswith("-") and self._attach(words, node):
            return
        self._attachable = self._dispatch(words, prefix, node)

    def _dispatch(self, words: list[str], prefix: list[tuple[str, str]], node: Node) -> bool:
        """Follow one command; true if it became an invocation that a broken continuation could belong to."""
        command, arguments = words[0], words[1:]
        if command in self.state.functions:
            self._call(command, arguments)
        elif command in ("source", ".") and arguments:
            self._source(arguments[0], node)
        elif command == "eval" and arguments:
            self._nested(" ".join(arguments), self.at(node), self.scene)
        elif command == "cd" and arguments:
            self.scene = self.scene.in_directory(arguments[0])
        elif command == "set":
            self.state.export_all = "-a" in arguments or ("+a" not in arguments and self.state.export_all)
        else:
            before = len(self.found.invocations)
            environment = [*self.state.environment(), *prefix]
            read_command(words, environment, self.at(node), self.found, self.scene, self._nested, dict(self._plain()))
            return len(self.found.invocations) > before
        return False

    def _plain(self) -> list[tuple[str, str]]:
        return [(name, " ".join(values)) for name, values in self.state.variables.items()]

    def _attach(self, words: list[str], node: Node) -> bool:
        """A line that starts with a flag: its continuation was broken above (a space after the backslash, a comment)."""
        if not self._attachable or not self.found.invocations:
            self.found.note(self.at(node), " ".join(words), "a line that starts with a flag, with no command above it")
            return True
        last = self.found.invocations[-1]
        self.found.invocations[-1] = replace(last, argv=(*last.argv, *words))
        why = "the line continuation above is broken, so a shell runs this line by itself; read as part of the command"
        self.found.note(self.at(node), " ".join(words), why)
        return True

    def _call(self, name: str, arguments: list[str]) -> None:
        body, source, place = self.state.functions[name]
        self.state.called.add(name)
        saved = {str(i): self.state.variables.get(str(i)) for i in range(1, 10)}
        for i, argument in enumerate(arguments[:9], 1):
            self.state.variables[str(i)] = [argument]
        self.state.variables["@"] = list(arguments)
        inner = ShellReader("", place, self.found, scene=self.scene, state=self.state)
        inner.source, inner.depth = source, self.depth + 1
        inner.words = Words(source, self.state.variables, self.scene.lookup)
        inner.walk(body)
        for key, value in saved.items():
            if value is None:
                self.state.variables.pop(key, None)
            else:
                self.state.variables[key] = value
        self.state.variables.pop("@", None)

    def _source(self, path: str, node: Node) -> None:
        file = self.scene.lookup(path)
        if file is None:
            self.found.note(
                self.at(node), path, "the sourced file is not among the given paths; its variables are not known"
            )
            return
        self._nested(file.text, Place(file.place.file, file.place.line or 1), self.scene)

    def _nested(self, text: str, place: Place, scene: Scene) -> None:
        """Read shell text found inside: a sourced file, `bash -c`, `ssh HOST`, a here document."""
        if self.depth >= MAX_DEPTH:
            self.found.note(place, text, "nested too deeply to follow")
            return
        # a container's shell knows the container's variables, not those of the script that starts it
        state = self.state if scene.environment == self.scene.environment else _seeded(scene)
        inner = ShellReader(text, place, self.found, scene=scene, state=state)
        inner.depth = self.depth + 1
        inner.read()


def _seeded(scene: Scene) -> ShellState:
    state = ShellState()
    for name, value in scene.environment:
        state.assign(name, [value], export=True)
    return state


def _is_writer(text: str) -> bool:
    return re.match(r"(?:sudo\s+)?(?:cat|tee|bash|sh|ssh)\b", text) is not None


def _mentions_vllm(text: str) -> bool:
    return "vllm" in text or "kv-transfer" in text or "mooncake" in text
