"""The other end of the firewall check. `doctor --peer` listens at the ports of its side that are free and answers; the
doctor on the other host connects to each, and asks it to connect back.

One line of JSON each way: {"mooncake_v0_doctor": 1, "check_back": [PORT, …]} and {"mooncake_v0_doctor": 1, "time": S,
"role": …, "not_listening": [PORT, …], "reached": {"PORT": "listening"|"refused"|"silent"}}. It connects back only to the
address that asks, and only to ports of the other side's plan.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, Mapping, Sequence

from mooncake_v0.config.model import MooncakeConfig, Role
from mooncake_v0.config.online import REFUSED, SILENT, reach

ANSWERED = "answered"
MAX_LINE_BYTES = 4096
_PROTOCOL = "mooncake_v0_doctor"


def plan_ports(config: MooncakeConfig, role: Role, ranks: int) -> list[int]:
    """Every port that a side binds, rank by rank."""
    rows = [config.ports(role, rank) for rank in range(ranks)]
    return [port for row in rows for port in (row.handshake, row.data, row.side_channel)]


@contextlib.contextmanager
def listening(address: str, ports: Sequence[int]) -> Iterator[tuple[list[socket.socket], list[int]]]:
    """Listeners at those ports that are free, and the ports that are taken."""
    with contextlib.ExitStack() as stack:
        listeners, taken = [], []
        for port in ports:
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
                listener.listen(16)
            except OSError:
                taken.append(port)
                continue
            listeners.append(listener)
        yield listeners, taken


@dataclass(frozen=True)
class Answering:
    """What a `--peer` run does: its side, its address, the other side's ports that it may connect back to."""

    role: Role
    address: str
    ports: Sequence[int]
    may_ask: Sequence[int]
    timeout_s: float = 3.0

    def serve(
        self, ready: Callable[[list[int], list[int]], None], heard: Callable[[str], None], keep_on: Callable[[], bool]
    ) -> None:
        """Answer while keep_on. ready gets the listening and the taken ports, heard each asker."""
        with listening(self.address, self.ports) as (listeners, taken), selectors.DefaultSelector() as selector:
            for listener in listeners:
                selector.register(listener, selectors.EVENT_READ)
            ready([listener.getsockname()[1] for listener in listeners], taken)
            while keep_on():
                for key, _ in selector.select(0.2):
                    assert isinstance(key.fileobj, socket.socket)
                    connection, source = key.fileobj.accept()
                    with connection:
                        self._answer(connection, source[0], taken, heard)

    def _answer(self, connection: socket.socket, source: str, taken: list[int], heard: Callable[[str], None]) -> None:
        question = _receive(connection, self.timeout_s)
        if question is None:
            return
        wanted = question.get("check_back")
        ports = [port for port in wanted if port in self.may_ask] if isinstance(wanted, list) else []
        if ports:
            heard(source)
        reached = reach(source, ports, self.timeout_s) if ports else {}
        answer = {_PROTOCOL: 1, "time": time.time(), "role": self.role, "not_listening": taken}
        _send(connection, {**answer, "reached": {str(port): state for port, state in reached.items()}})


@dataclass(frozen=True)
class Asked:
    """The other host as seen from here.

    states: port -> answered (a doctor is there), listening (another program), refused or silent
    reached: what the other host says of our ports; taken: our ports that another program has
    not_listening: ports at which its doctor could not listen; clock_offset_s: its clock minus ours, if it answered
    """

    states: Mapping[int, str]
    reached: Mapping[int, str] = field(default_factory=dict)
    taken: Sequence[int] = ()
    not_listening: Sequence[int] = ()
    clock_offset_s: float | None = None


def ask(
    address: str, ports: Sequence[int], own_address: str | None, own_ports: Sequence[int], timeout_s: float
) -> Asked:
    """Connect to each port of the other host; at the first that a doctor answers, have it connect back to our ports."""
    states = reach(address, list(ports), timeout_s)
    open_ports = [port for port, state in states.items() if state not in (REFUSED, SILENT)]
    with listening(own_address or "", own_ports if own_address else []) as (_, taken):
        for port in open_ports:
            started_s = time.time()
            answer = _question(address, port, [own for own in own_ports if own not in taken], timeout_s)
            if answer is not None:
                middle_s = (started_s + time.time()) / 2
                break
        else:
            return Asked(states, taken=tuple(taken))
    known = {
        port: ANSWERED if port in open_ports and port not in answer["not_listening"] else states[port]
        for port in states
    }
    back = {int(port): str(state) for port, state in answer["reached"].items()}
    # the connecting back takes its time before the answer's clock is read; that is within the timeout
    return Asked(known, back, tuple(taken), tuple(answer["not_listening"]), answer["time"] - middle_s)


def _question(address: str, port: int, own_ports: Sequence[int], timeout_s: float) -> dict[str, Any] | None:
    """The answer of a doctor at that port; None if something else is there."""
    with socket.socket() as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect((address, port))
            _send(connection, {_PROTOCOL: 1, "check_back": list(own_ports)})
            answer = _receive(connection, 3 * timeout_s)  # it tries our ports first, all at once
        except OSError:
            return None
    if (
        answer is None
        or not isinstance(answer.get("not_listening"), list)
        or not isinstance(answer.get("reached"), dict)
    ):
        return None
    return answer if isinstance(answer.get("time"), float) else None


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, timeout_s: float) -> dict[str, Any] | None:
    """One line of our protocol; None for anything else, or when it is late."""
    connection.settimeout(timeout_s)
    data = b""
    with contextlib.suppress(OSError):
        while not data.endswith(b"\n") and len(data) < MAX_LINE_BYTES:
            piece = connection.recv(MAX_LINE_BYTES)
            if not piece:
                break
            data += piece
    try:
        message = json.loads(data)
    except ValueError:
        return None
    return message if isinstance(message, dict) and message.get(_PROTOCOL) == 1 else None
