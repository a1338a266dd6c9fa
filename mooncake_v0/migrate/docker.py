"""The command line of `docker run` (and podman, nerdctl) as data. Called by `commands`; nothing is run."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Mapping, Sequence

# options of docker run that stand alone; every other option takes a value
_ALONE = frozenset(
    [
        "-d",
        "--detach",
        "-i",
        "--interactive",
        "-t",
        "--tty",
        "--rm",
        "--init",
        "--privileged",
        "--read-only",
        "-P",
        "--publish-all",
        "--no-healthcheck",
        "--oom-kill-disable",
        "--sig-proxy",
        "-q",
        "--quiet",
        "--disable-content-trust",
        "--replace",
        "--tls-verify",
    ]
)
_SHORT_ALONE = set("ditPq")


@dataclass(frozen=True)
class DockerRun:
    """One docker run.

    program: docker, podman or nerdctl; options: (option, value or "") that are kept for V1, without -e, -p, -v
    """

    program: str = "docker"
    options: tuple[tuple[str, str], ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    env_files: tuple[str, ...] = ()
    mounts: tuple[tuple[str, str], ...] = ()
    volumes: tuple[str, ...] = ()
    ports: tuple[tuple[str, str], ...] = ()
    name: str = ""
    hostname: str = ""
    entrypoint: tuple[str, ...] = ()
    image: str = ""
    arguments: tuple[str, ...] = ()


def parse_docker_run(words: Sequence[str], variables: Mapping[str, str]) -> DockerRun:
    """Split the words after `docker`; variables give `-e NAME` its value."""
    start = next(i for i, word in enumerate(words) if word in ("run", "create")) + 1
    options, index = _options(words, start)
    values = [(name, value) for name, value in options]
    env = [_env_pair(value, variables) for name, value in values if name in ("-e", "--env")]
    volumes = [value for name, value in values if name in ("-v", "--volume")]
    special = {"-e", "--env", "-v", "--volume", "-p", "--publish", "--name", "--entrypoint", "--env-file", "--mount"}
    return DockerRun(
        program=words[0],
        options=tuple((name, value) for name, value in values if name not in special),
        env=tuple(env),
        env_files=tuple(value for name, value in values if name == "--env-file"),
        mounts=tuple(_mount(v) for v in volumes) + tuple(_long_mount(v) for name, v in values if name == "--mount"),
        volumes=tuple(volumes),
        ports=tuple(_port(value) for name, value in values if name in ("-p", "--publish")),
        name=_last(values, "--name"),
        hostname=_last(values, "--hostname") or _last(values, "-h"),
        entrypoint=tuple(split_words(_last(values, "--entrypoint"))),
        image=words[index] if index < len(words) else "",
        arguments=tuple(words[index + 1 :]),
    )


def _options(words: Sequence[str], index: int) -> tuple[list[tuple[str, str]], int]:
    options: list[tuple[str, str]] = []
    while index < len(words) and words[index].startswith("-"):
        word = words[index]
        if "=" in word and word.startswith("--"):
            name, _, value = word.partition("=")
            options.append((name, value))
        elif word in _ALONE or (not word.startswith("--") and set(word[1:]) <= _SHORT_ALONE):
            options.append((word, ""))
        elif not word.startswith("--") and len(word) > 2:
            options.append((word[:2], word[2:]))
        else:
            index += 1
            options.append((word, words[index] if index < len(words) else ""))
        index += 1
    return options, index


def _last(options: Sequence[tuple[str, str]], name: str) -> str:
    return next((value for option, value in reversed(options) if option == name), "")


def _env_pair(value: str, variables: Mapping[str, str]) -> tuple[str, str]:
    name, equals, text = value.partition("=")
    return name, text if equals else variables.get(name, f"${{{name}}}")


def _mount(value: str) -> tuple[str, str]:
    parts = value.split(":")
    return (parts[1], parts[0]) if len(parts) > 1 else (value, "")


def _long_mount(value: str) -> tuple[str, str]:
    pairs = dict(part.partition("=")[::2] for part in value.split(","))
    target = pairs.get("target") or pairs.get("destination") or pairs.get("dst", "")
    return target, pairs.get("source") or pairs.get("src", "")


def _port(value: str) -> tuple[str, str]:
    parts = value.partition("/")[0].split(":")
    return (parts[-2], parts[-1]) if len(parts) > 1 else ("", value)


def split_words(text: str) -> list[str]:
    """Words of a command string in shell quoting, without expanding anything; one word if its quotes do not match."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()
