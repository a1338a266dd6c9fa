"""The cable between two network namespaces: a process that carries packets between two TUN devices, well or badly.

It needs no kernel module for what it does to packets (netem is often missing) and its random numbers have a seed. It
lives in prefill's namespace, which exists as long as this process; one JSON object a line on standard input changes its
state, and the end of standard input ends it.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, replace

MTU_BYTES = 9000
DEVICE = "soak0"
QUEUED_PACKETS = 20_000  # what is on its way while packets are delayed; more is dropped, as a switch would
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000


@dataclass(frozen=True)
class CableState:
    """up: whether anything passes. delay_ms and up to jitter_ms more, each way. loss: share of packets dropped."""

    up: bool = True
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0


def open_tun(address: str) -> int:
    """A TUN device in this process's network namespace with `address` of a /24; returns its descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    for command in (
        f"ip link set {DEVICE} mtu {MTU_BYTES} txqueuelen 2000 up",
        f"ip address add {address}/24 dev {DEVICE}",
        "ip link set lo up",
    ):
        subprocess.run(command.split(), check=True, capture_output=True)
    return fd


class Cable:
    """Carries packets between two descriptors until standard input ends."""

    def __init__(self, ends: tuple[int, int], seed: int) -> None:
        self.state = CableState()
        self._other = {ends[0]: ends[1], ends[1]: ends[0]}
        self._random = random.Random(seed)
        self._on_the_way: list[tuple[float, int, int, bytes]] = []  # due, number, to, packet
        self._number = 0

    def run(self) -> None:
        poller = select.poll()
        for fd in (*self._other, sys.stdin.fileno()):
            poller.register(fd, select.POLLIN)
        while True:
            for fd, _ in poller.poll(self._wait_ms()):
                if fd in self._other:
                    self._carry(fd)
                elif not self._obey():
                    return
            self._deliver()

    def _obey(self) -> bool:
        line = sys.stdin.readline()
        if line:
            self.state = replace(self.state, **json.loads(line))
            print("done", flush=True)
        return bool(line)

    def _carry(self, fd: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(fd, 65536)
            except BlockingIOError:
                return
            state = self.state
            if not state.up or self._random.random() < state.loss or len(self._on_the_way) >= QUEUED_PACKETS:
                continue
            if not state.delay_ms:
                self._write(self._other[fd], packet)
                continue
            delay_ms = state.delay_ms + self._random.random() * state.jitter_ms
            self._number += 1
            heapq.heappush(self._on_the_way, (time.monotonic() + delay_ms / 1e3, self._number, self._other[fd], packet))

    def _deliver(self) -> None:
        now_s = time.monotonic()
        while self._on_the_way and self._on_the_way[0][0] <= now_s:
            _, _, fd, packet = heapq.heappop(self._on_the_way)
            if self.state.up:
                self._write(fd, packet)

    def _wait_ms(self) -> float | None:
        if not self._on_the_way:
            return None
        return max(0.0, (self._on_the_way[0][0] - time.monotonic()) * 1e3)

    @staticmethod
    def _write(fd: int, packet: bytes) -> None:
        with contextlib.suppress(OSError):  # a full queue drops, as a network does
            os.write(fd, packet)


def main(argv: list[str]) -> None:
    """``cable FD ADDRESS SEED``: FD is the other namespace's device, ADDRESS is for a device in this one."""
    far, seed = int(argv[0]), int(argv[2])
    near = open_tun(argv[1])
    print("ready", flush=True)
    Cable((far, near), seed).run()


if __name__ == "__main__":
    main(sys.argv[1:])
