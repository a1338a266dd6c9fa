"""Questions to the outside, each with a deadline: the metadata server, names, this host's ports, a peer's ports.

Asked by `validate --online`, `launch` and `doctor`; `config.online_rules` says what the answers mean. The metadata store
is the caller's: this part only says what to ask it.
"""

from __future__ import annotations

import errno
import http.client
import json
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from mooncake_v0.at_once import at_once
from mooncake_v0.config.model import RankPorts
from mooncake_v0.url_parts import IPV4

LISTENING, REFUSED, SILENT = "listening", "refused", "silent"
MAX_ANSWER_BYTES = 1 << 20


class Store(Protocol):
    """The three calls of a metadata store that a round trip needs."""

    def put(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes | None: ...
    def delete(self, key: str) -> bool: ...


def round_trip(store: Store, key: str, value: bytes) -> bool:
    """Whether the store gives back what was written, and forgets it when told to. Raises what the store raises."""
    store.put(key, value)
    kept = store.get(key)
    store.delete(key)
    return kept == value and store.get(key) is None


def resolve(host: str, timeout_s: float) -> str | None:
    """The first IPv4 address of a name, as the engine takes it; None if there is none within the deadline."""
    if IPV4.fullmatch(host):
        return host
    answers: list[str] = []

    def ask() -> None:
        with suppress(OSError, UnicodeError):  # no answer is the answer
            answers.append(str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]))

    # the resolver has no deadline of its own; a thread that is late is left behind
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answers[0] if answers else None


def is_local(address: str) -> bool:
    """Whether the address is this machine's: only then can a socket be bound to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def busy_ports(address: str, rows: list[RankPorts]) -> dict[int, str]:
    """Port -> its use, for the ports of the rows that cannot be bound: the engine's on all addresses, ours on one."""
    busy: dict[int, str] = {}
    for rank, row in enumerate(rows):
        for host, port, use in (
            (address, row.handshake, f"engine handshake of rank {rank}"),
            ("0.0.0.0", row.data, f"engine data of rank {rank}"),
            (address, row.side_channel, f"side channel of rank {rank}"),
        ):
            if _is_busy(host, port):
                busy[port] = use
    return busy


def _is_busy(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return error.errno in (errno.EADDRINUSE, errno.EACCES)
    return False


def reach(address: str, ports: list[int], timeout_s: float) -> dict[int, str]:
    """Port -> listening, refused or silent. All are asked at once, so the whole takes one deadline."""
    return dict(zip(ports, at_once(lambda port: _reach(address, port, timeout_s), ports)))


@dataclass(frozen=True)
class ApiAnswer:
    """What an OpenAI API's port said. models: the ids of /v1/models; None if this is no such API; () if a key is needed."""

    state: str
    models: tuple[str, ...] | None = None


def ask_api(address: str, port: int, timeout_s: float) -> ApiAnswer:
    """Ask for /v1/models, without a key and without any proxy of the environment. Ends within two timeouts."""
    connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
    try:
        connection.request("GET", "/v1/models")
        answer = connection.getresponse()
        if answer.status in (401, 403):
            return ApiAnswer(LISTENING, ())
        listed = json.loads(answer.read(MAX_ANSWER_BYTES))
        return ApiAnswer(LISTENING, tuple(str(item["id"]) for item in listed["data"]))
    except ConnectionRefusedError:
        return ApiAnswer(REFUSED)
    except (http.client.HTTPException, ValueError, TypeError, LookupError):
        return ApiAnswer(LISTENING)  # it talks, but not like this API
    except OSError:
        return ApiAnswer(SILENT)
    finally:
        connection.close()


def _reach(address: str, port: int, timeout_s: float) -> str:
    try:
        with socket.create_connection((address, port), timeout=timeout_s):
            return LISTENING
    except ConnectionRefusedError:
        return REFUSED
    except OSError:
        return SILENT
