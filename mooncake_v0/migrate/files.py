"""From paths to `Found`: collects the files, tells their format from name and content, and calls the readers.

Called by `report.build`. Files are read as bytes and decoded; whatever holds no deployment is listed with the reason.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterable

import yaml

from mooncake_v0.errors import CouldNotCheckError
from mooncake_v0.migrate.commands import Nested, Scene
from mooncake_v0.migrate.compose import is_compose, read_compose
from mooncake_v0.migrate.document import load_all
from mooncake_v0.migrate.env_files import looks_like_env_file
from mooncake_v0.migrate.json_values import parse_mooncake_json
from mooncake_v0.migrate.kubernetes import is_manifest, read_manifests
from mooncake_v0.migrate.lookup import find_file
from mooncake_v0.migrate.python_scripts import note_python, parse_proxy
from mooncake_v0.migrate.records import Found, Place, Shape, TextFile
from mooncake_v0.migrate.secrets import Secrets
from mooncake_v0.migrate.shell import ShellReader
from mooncake_v0.migrate.supervisord import is_supervisord, read_supervisord
from mooncake_v0.migrate.systemd import is_unit, read_unit

MAX_FILE_BYTES = 1_000_000
MAX_FILES = 2000
MAX_ALIASES = 100
_SKIPPED_FOLDERS = frozenset([".git", "__pycache__", "node_modules", ".venv", "venv"])
# a file without any of these words has nothing to say about a deployment, but may still be named by one that has
_RELEVANT = re.compile(
    r"vllm|mooncake|kv[-_]transfer|etcd|redis|prefill|proxy|completions|architectures", re.IGNORECASE
)
_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)


def collect(paths: Iterable[str], stdin: str = "") -> tuple[list[TextFile], Found]:
    """The text files under the paths, in a fixed order, and notes on those that are not text; "-" is stdin."""
    files: list[TextFile] = []
    found = Found()
    for given in paths:
        if given == "-":
            files.append(TextFile("stdin", stdin, Place("stdin")))
            continue
        path = Path(given)
        if not path.exists():
            raise CouldNotCheckError(f"no such file or folder: {given}", fix="give the files of the deployment")
        for member in _members(path):
            text = _text(member, found)
            if text is not None:
                files.append(TextFile(member.as_posix(), text, Place(member.as_posix())))
    if len(files) > MAX_FILES:
        raise CouldNotCheckError(
            f"{len(files)} files are more than {MAX_FILES}", fix="give the deployment's own folder"
        )
    return files, found


def _members(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    members = (item for item in path.rglob("*") if item.is_file())
    kept = [item for item in members if not _SKIPPED_FOLDERS & set(item.relative_to(path).parts)]
    return sorted(kept, key=lambda item: item.as_posix())[: MAX_FILES + 1]


def _text(path: Path, found: Found) -> str | None:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            found.note(Place(path.as_posix()), path.name, f"larger than {MAX_FILE_BYTES:,} bytes; not read")
            return None
        content = path.read_bytes()
    except OSError as error:
        raise CouldNotCheckError(f"cannot read {path}: {error.strerror}", fix="check the permissions") from error
    if b"\0" in content:
        found.note(Place(path.as_posix()), path.name, "a binary file; not read")
        return None
    # "surrogateescape" would let bytes through that no output takes
    return content.decode("utf-8-sig", errors="replace").replace("\r\n", "\n")


class Files:
    """Reads a set of files into one `Found`."""

    def __init__(self, files: list[TextFile], found: Found, secrets: Secrets):
        self.files = files
        self.found = found
        self.secrets = secrets

    def read(self) -> Found:
        for file in self.files:
            self._scan(file)
        for file in self.files:
            before = self._counts()
            if _RELEVANT.search(file.text):
                self._read(file)
            if self._counts() == before and not self._is_env_file(file):
                self.found.note(file.place, file.path, "holds nothing of a deployment that is understood here")
        for file in self.files:
            if self._is_env_file(file) and file.path not in self.found.used:
                self.found.note(file.place, file.path, "an env file that nothing given names")
        # files written by scripts and ConfigMaps: mooncake.json and proxies are read where they are looked up
        self.found.files = [*self.files, *self.found.files]
        return self.found

    def _scan(self, file: TextFile) -> None:
        """Look for secrets; what a document says in prose is not an assignment, what stands in its blocks is."""
        prose = file.path.lower().endswith((".md", ".rst", ".markdown", ".txt"))
        self.secrets.scan(file.text, prose=prose)
        for match in _FENCE.finditer(file.text) if prose else ():
            self.secrets.scan(match[2])

    def _counts(self) -> tuple[int, ...]:
        found = self.found
        return len(found.invocations), len(found.files), len(found.unread), len(found.versions), len(found.services)

    def lookup(self, file: TextFile, written: str) -> TextFile | None:
        """A file that another one names."""
        named = find_file([*self.files, *self.found.files], written, file.path)
        self.found.used |= {named.path} if named else set()
        return named

    def _is_env_file(self, file: TextFile) -> bool:
        return looks_like_env_file(file.text) and not file.path.endswith((".py", ".json", ".yaml", ".yml"))

    def nested(self, file: TextFile) -> Nested:
        def read(text: str, place: Place, scene: Scene) -> None:
            self._shell(text, place, scene, file)

        return read

    def _shell(self, text: str, place: Place, scene: Scene, file: TextFile) -> None:
        scene = replace(scene, lookup=lambda path: self.lookup(file, path))
        ShellReader(text, place, self.found, scene=scene).read()

    def _read(self, file: TextFile) -> None:
        name = file.path.rpartition("/")[2].lower()
        if name.endswith(".py"):
            if parse_proxy(file.text, file.place) is None:
                note_python(file.text, file.path, self.found)
            else:
                self.found.files.append(replace(file, path=file.path))
        elif is_unit(file.text):
            read_unit(file.text, file.path, self.found, lambda path: self.lookup(file, path), self.nested(file))
        elif is_supervisord(file.text):
            read_supervisord(file.text, file.path, self.found, self.nested(file))
        elif name.endswith((".md", ".rst", ".markdown")):
            self._markdown(file)
        elif name.endswith((".json", ".json5")) or parse_mooncake_json(file.text):
            self._json(file)
        elif name.endswith((".yaml", ".yml")) or _looks_like_yaml(file.text):
            self._yaml(file)
        elif name == "dockerfile" or name.endswith(".dockerfile") or name.startswith("dockerfile."):
            self._dockerfile(file)
        elif not self._is_env_file(file):
            self._script(file)

    def _script(self, file: TextFile) -> None:
        shape = Shape("slurm", _directives(file.text)) if "#SBATCH" in file.text else Shape("shell")
        self._shell(file.text, Place(file.path, 1), Scene(shape=shape), file)

    def _markdown(self, file: TextFile) -> None:
        for match in _FENCE.finditer(file.text):
            place = Place(file.path, file.text[: match.start(2)].count("\n") + 1)
            if match[1].lower() in ("", "bash", "sh", "shell", "console", "text"):
                text = re.sub(r"(?m)^\s*[$#] (?=\S)", "", match[2]) if match[1].lower() == "console" else match[2]
                self._shell(text, place, Scene(), file)
            elif match[1].lower() in ("json", "python", "py"):
                self.found.files.append(TextFile(f"{file.path}#{place.line}.{match[1]}", match[2], place))

    def _json(self, file: TextFile) -> None:
        if parse_mooncake_json(file.text) is not None:
            self.found.files.append(file)
        elif '"kind"' in file.text or '"services"' in file.text or '"architectures"' in file.text:
            self._yaml(file)
        else:
            self.found.note(file.place, file.path, "a JSON file that is neither a mooncake.json nor a manifest")

    def _yaml(self, file: TextFile) -> None:
        if "{{" in file.text and re.search(r"\{\{-?\s*[.$(\w]", file.text):
            self.found.note(
                file.place, file.path, "a Helm template: render it first (helm template), then give the output"
            )
            return
        if len(re.findall(r"(?m)[\s\[,]\*[A-Za-z]", file.text)) > MAX_ALIASES:
            self.found.note(file.place, file.path, f"more than {MAX_ALIASES} YAML aliases; not read")
            return
        try:
            documents, lines = load_all(file.text)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            place = Place(file.path, mark.line + 1 if mark else 0)
            self.found.note(place, getattr(error, "problem", "") or "not YAML", "not valid YAML")
            return
        self._documents(documents, lines, file)

    def _documents(self, documents: list[Any], lines: dict[int, int], file: TextFile) -> None:
        for document in documents:
            if is_compose(document):
                lookup, nested = (lambda path: self.lookup(file, path)), self.nested(file)
                read_compose(document, lines, file.path, self.found, lookup, nested)
            elif isinstance(document, dict) and isinstance(document.get("architectures"), list):
                self.found.files.append(file)
        if any(is_manifest(document) for document in documents):
            read_manifests(documents, lines, file.path, self.found, self.secrets, self.nested(file))

    def _dockerfile(self, file: TextFile) -> None:
        match = re.search(r"(?mi)^FROM\s+\S*vllm[^\s:]*:v?(\d+\.\d+\.\d+(?:\.post\d+)?)", file.text)
        if match:
            self.found.versions.append(("vllm", match[1], file.place))
        self.found.note(file.place, file.path, "a Dockerfile: its CMD is not read, build a new image for V1")


def _looks_like_yaml(text: str) -> bool:
    return re.search(r"(?m)^(?:apiVersion|services|kind):", text) is not None


def _directives(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("#SBATCH")]
