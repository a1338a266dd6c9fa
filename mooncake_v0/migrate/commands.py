"""From the words of one command to an `Invocation`: strips wrappers (env, nohup, srun, ssh, docker run, bash -c ...).

Called by every reader that has an argument vector: `shell` for its commands, `compose`, `kubernetes`, `systemd` and
`supervisord` for theirs. Commands that have nothing to do with vLLM are passed over; one that mentions it and is not
understood is noted.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field, replace
from typing import Callable, Mapping, Sequence

from mooncake_v0.migrate.command_words import (
    PASSED_OVER,
    SHELLS,
    basename,
    is_install,
    is_vllm_image,
    mentions_vllm,
    note_image,
    note_versions,
    target_index,
)
from mooncake_v0.migrate.docker import parse_docker_run
from mooncake_v0.migrate.env_files import parse_env_file
from mooncake_v0.migrate.records import Found, Invocation, Lookup, Place, Shape, no_lookup

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


Nested = Callable[[str, Place, "Scene"], None]


@dataclass(frozen=True)
class Scene:
    """Where commands run: what the format around them says.

    environment is a container's, for shells inside it; lookup finds the files that commands name.
    """

    shape: Shape = Shape("shell")
    name: str = ""
    host: str = ""
    directory: str = ""
    image: str = ""
    mounts: tuple[tuple[str, str], ...] = ()
    ports: tuple[tuple[str, str], ...] = ()
    service_links: bool = True
    environment: tuple[tuple[str, str], ...] = ()
    lookup: Lookup = field(default=no_lookup, compare=False)

    def on_host(self, host: str) -> Scene:
        return replace(self, host=host.rpartition("@")[2])

    def in_directory(self, directory: str) -> Scene:
        return replace(self, directory=posixpath.normpath(posixpath.join(self.directory, directory)))


def read_command(
    words: Sequence[str],
    environment: Sequence[tuple[str, str]],
    place: Place,
    found: Found,
    scene: Scene,
    nested: Nested,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Follow one command to the process it starts, and record that process.

    nested reads a string as shell text (`bash -c`, `ssh`); variables are what a shell knows, for `docker run -e NAME`.
    """
    words = list(words)
    note_versions(words, place, found)
    start = target_index(words)
    if start is None:
        if mentions_vllm(words) and basename(words[0]) not in PASSED_OVER and not is_install(words):
            found.note(place, " ".join(words), "mentions vLLM or Mooncake, but is no command that is understood here")
        return
    extra, scene = _wrapper_facts(words[:start], scene)
    environment = [*environment, *extra]
    target = words[start:]
    head = basename(target[0])
    if head == "ssh":
        _ssh(target, place, scene, nested)
    elif head in SHELLS:
        _shell(target, place, scene, nested)
    elif head in ("docker", "podman", "nerdctl"):
        _docker(target, environment, place, found, scene, nested, variables or {})
    elif head in ("tmux", "screen"):
        nested(" ".join(target[-1:]), place, scene)
    else:
        found.invocations.append(_invocation(target, environment, place, scene))


def _invocation(argv: Sequence[str], environment: Sequence[tuple[str, str]], place: Place, scene: Scene) -> Invocation:
    return Invocation(
        argv=tuple(argv),
        env=tuple(dict(environment).items()),
        place=place,
        shape=scene.shape,
        name=scene.name,
        host=scene.host,
        image=scene.image,
        mounts=scene.mounts,
        ports=scene.ports,
        service_links=scene.service_links,
    )


def _wrapper_facts(words: Sequence[str], scene: Scene) -> tuple[list[tuple[str, str]], Scene]:
    """Variables and the host that wrappers set: `env A=B`, `srun -w NODE`."""
    environment = [(match[1], match[2]) for match in map(_ASSIGNMENT.fullmatch, words) if match]
    for index, word in enumerate(words):
        match = re.fullmatch(r"(?:--nodelist|-w)(?:=(.+))?", word)
        if match and words and any(basename(w) == "srun" for w in words):
            host = match[1] or (words[index + 1] if index + 1 < len(words) else "")
            scene = scene.on_host(host)
        if word.startswith("--export=") and any(basename(w) == "srun" for w in words):
            environment += [(m[1], m[2]) for m in map(_ASSIGNMENT.fullmatch, word[9:].split(",")) if m]
    return environment, scene


def _ssh(words: Sequence[str], place: Place, scene: Scene, nested: Nested) -> None:
    takes_value = set(
        [
            "-p",
            "-i",
            "-l",
            "-o",
            "-F",
            "-J",
            "-L",
            "-R",
            "-D",
            "-b",
            "-c",
            "-e",
            "-m",
            "-S",
            "-W",
            "-w",
            "-B",
            "-E",
            "-I",
            "-O",
            "-Q",
        ]
    )
    index = 1
    while index < len(words) and words[index].startswith("-"):
        index += 2 if words[index] in takes_value else 1
    if index + 1 < len(words):
        nested(" ".join(words[index + 1 :]), place, scene.on_host(words[index]))


def _shell(words: Sequence[str], place: Place, scene: Scene, nested: Nested) -> None:
    for index, word in enumerate(words):
        if re.fullmatch(r"-[a-z]*c", word) and index + 1 < len(words):
            nested(words[index + 1], place, scene)
            return


def _docker(
    words: Sequence[str],
    environment: Sequence[tuple[str, str]],
    place: Place,
    found: Found,
    scene: Scene,
    nested: Nested,
    variables: Mapping[str, str],
) -> None:
    run = parse_docker_run(words, variables | dict(environment) if isinstance(variables, dict) else dict(environment))
    if not run.image:
        found.note(place, " ".join(words), "docker run without an image")
        return
    container_env = dict(pair for path in run.env_files for pair in _env_file(path, place, found, scene))
    container_env.update(run.env)
    inner = replace(
        scene,
        shape=Shape("docker", run),
        name=run.name or scene.name,
        host=run.hostname or scene.host,
        image=run.image,
        mounts=run.mounts,
        ports=run.ports,
    )
    container_command(run.entrypoint, run.arguments, list(container_env.items()), place, found, inner, nested)


def _env_file(path: str, place: Place, found: Found, scene: Scene) -> list[tuple[str, str]]:
    file = scene.lookup(path)
    if file is None:
        found.note(place, f"--env-file {path}", "is not among the given paths; its variables are not known")
        return []
    return parse_env_file(file.text)


def container_command(
    entrypoint: Sequence[str],
    arguments: Sequence[str],
    environment: Sequence[tuple[str, str]],
    place: Place,
    found: Found,
    scene: Scene,
    nested: Nested,
) -> None:
    """A container's process: entrypoint and arguments, with the server as entrypoint of the vllm-openai image."""
    note_image(scene.image, place, found)
    words = [*entrypoint, *arguments]
    if not entrypoint and (not words or words[0].startswith("-")) and is_vllm_image(scene.image):
        words = ["python3", "-m", "vllm.entrypoints.openai.api_server", *words]
    server = re.match(r"(etcd|redis)(?![a-z])", scene.image.rpartition("/")[2])
    if server and not entrypoint and (not words or words[0].startswith("-")):
        words = [{"redis": "redis-server"}.get(server[1], server[1]), *words]
    if not entrypoint and words[:1] == ["serve"] and is_vllm_image(scene.image):
        words = ["vllm", *words]
    if entrypoint and basename(entrypoint[-1]) in SHELLS and arguments and not arguments[0].startswith("-"):
        words = [*entrypoint, "-c", *arguments]
    if words:
        scene = replace(scene, environment=tuple(environment))
        read_command(words, environment, place, found, scene, nested)
