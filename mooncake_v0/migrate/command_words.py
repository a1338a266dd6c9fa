"""Recognises in the words of a command, or in an image's name, what starts a process we know. Called by `commands`."""

from __future__ import annotations

import posixpath
import re
from typing import Sequence

from mooncake_v0.migrate.records import Found, Place

SHELLS = frozenset(["bash", "sh", "dash", "zsh", "ash"])
SERVERS = frozenset(["etcd", "redis-server", "mooncake-v0", "mooncake_master"])
# ordinary commands of launch scripts; a mention of vLLM in their arguments means nothing
# fmt: off
PASSED_OVER = frozenset(
    [
        "echo", "printf", "mkdir", "rm", "cp", "mv", "ls", "cat", "sleep", "kill", "pkill", "killall", "trap",
        "exit", "return", "export", "unset", "wait", "tail", "tee", "curl", "wget", "test", "[", "[[", "true",
        "false", "ulimit", "module", "scp", "rsync", "git", "chmod", "chown", "grep", "sed", "awk", "which", "hash",
        "read", "shift", "local", "cd", "pushd", "popd", "set", "kubectl", "helm", "systemctl", "journalctl",
        "supervisorctl", "docker-compose", "python-config", "nvidia-smi", "ibv_devinfo", "sbatch",
    ]
)
# fmt: on


def basename(word: str) -> str:
    return posixpath.basename(word)


def mentions_vllm(words: Sequence[str]) -> bool:
    return any("vllm" in word or "kv-transfer-config" in word or "mooncake" in word.lower() for word in words)


def is_install(words: Sequence[str]) -> bool:
    return "install" in words or "uninstall" in words or "download" in words


def target_index(words: Sequence[str]) -> int | None:
    """Index of the word that starts a process we know, behind any wrappers; None if there is none."""
    if basename(words[0]) in PASSED_OVER:
        return None
    for index in range(len(words)):
        if _starts_target(words[index:]):
            return index
    return None


def _starts_target(words: Sequence[str]) -> bool:
    head, following = basename(words[0]), list(words[1:])
    if head == "vllm":
        return following[:1] == ["serve"]
    if re.fullmatch(r"python[0-9.]*", head):
        script = next((word for word in following if not re.fullmatch(r"-[uOBEsSI]+", word)), "")
        return script == "-m" and _is_module(following) or script.endswith(".py")
    if head in SERVERS or head == "ssh":
        return head != "mooncake-v0" or following[:1] in (["proxy"], ["metadata"], ["launch"])
    if head in SHELLS:
        return any(re.fullmatch(r"-[a-z]*c", word) for word in following[:3])
    if head in ("docker", "podman", "nerdctl"):
        return "run" in following[:2] or "create" in following[:2]
    if head in ("tmux", "screen"):
        return mentions_vllm(following[-1:])
    return head.endswith(".py") and "/" in words[0]


def _is_module(words: Sequence[str]) -> bool:
    module = words[words.index("-m") + 1] if words.index("-m") + 1 < len(words) else ""
    return module.startswith(("vllm", "mooncake", "http_metadata_server"))


def is_vllm_image(image: str) -> bool:
    return "vllm" in image.rpartition("/")[2]


def note_image(image: str, place: Place, found: Found) -> None:
    match = re.search(r"vllm[^/:]*:v?(\d+\.\d+\.\d+(?:\.post\d+)?)", image)
    if match:
        found.versions.append(("vllm", match[1], place))


def note_versions(words: Sequence[str], place: Place, found: Found) -> None:
    """Versions that a pip install names."""
    if "install" not in words:
        return
    for word in words:
        match = re.fullmatch(r"(vllm|mooncake-transfer-engine|mooncake-v0)(?:\[[^\]]*\])?==([\w.+]+)", word)
        if match:
            found.versions.append((match[1], match[2], place))
