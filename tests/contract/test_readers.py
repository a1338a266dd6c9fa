"""What an agent expects of whatever reads a peer's memory, of both readers, with the pinned engine at the other end."""

from __future__ import annotations

import ctypes
import random
import time
from typing import Iterator, Union

import pytest

from mooncake_v0.errors import EngineError
from mooncake_v0.metadata.gateway import start_gateway_thread
from mooncake_v0.transfer.engine import MooncakeEngine
from mooncake_v0.transfer.tcp_reader import PIECE_BYTES, TcpReader
from tests.engine_child import Engine, free_name
from tests.freezing import frozen
from tests.servers import wait_until

pytestmark = pytest.mark.pin

REGION_BYTES = 4 * PIECE_BYTES + 4096
SEED = 7


@pytest.fixture(scope="module")
def metadata() -> Iterator[str]:
    gateway = start_gateway_thread("memory:")
    yield gateway.url
    gateway.close()


class Served:
    """An engine that serves a region of known bytes."""

    def __init__(self, metadata: str) -> None:
        self.engine = Engine()
        self.name = free_name()
        assert self.engine.ask("initialize", name=self.name, metadata=metadata) == 0
        code, self.address = self.engine.ask("register", size=REGION_BYTES, seed=SEED)
        assert code == 0
        self.content = random.Random(SEED).randbytes(REGION_BYTES)


@pytest.fixture
def served(metadata: str) -> Iterator[Served]:
    made = Served(metadata)
    yield made
    made.engine.kill()


class WithTheEngine:
    """MooncakeEngine's call, in a process of its own: an engine stays for good in the one that imported it."""

    cancels = MooncakeEngine.cancels

    def __init__(self, metadata: str) -> None:
        self.engine = Engine()
        assert self.engine.ask("initialize", name=free_name(), metadata=metadata) == 0

    def read(self, name: str, address: int, nbytes: int) -> bytes:
        code, data = self.engine.ask("read", name=name, address=address, size=nbytes)
        if code:
            raise EngineError(f"code {code}")
        return bytes.fromhex(data)

    def target(self) -> bytes:
        return bytes.fromhex(self.engine.ask("target"))

    def close(self) -> None:
        self.engine.kill()


class WithTheTcpReader:
    cancels = TcpReader.cancels

    def __init__(self, metadata: str) -> None:
        self._target = ctypes.create_string_buffer(1)

    def read(self, name: str, address: int, nbytes: int) -> bytes:
        host, port = name.split(":")
        self._target = ctypes.create_string_buffer(nbytes)
        TcpReader(host, int(port) + 1).read(name, ctypes.addressof(self._target), address, nbytes)
        return self._target.raw

    def target(self) -> bytes:
        return self._target.raw

    def close(self) -> None:
        pass


Reading = Union[WithTheEngine, WithTheTcpReader]


@pytest.fixture(params=[WithTheEngine, WithTheTcpReader])
def reader(request: pytest.FixtureRequest, metadata: str) -> Iterator[Reading]:
    made = request.param(metadata)
    yield made
    made.close()


@pytest.mark.parametrize("nbytes", [1, 64 << 10, PIECE_BYTES, 3 * PIECE_BYTES + 17])
@pytest.mark.parametrize("offset", [0, 4095])
def test_exactly_the_bytes_asked_for_arrive(served: Served, reader: Reading, nbytes: int, offset: int) -> None:
    assert reader.read(served.name, served.address + offset, nbytes) == served.content[offset : offset + nbytes]


def test_one_read_after_the_other(served: Served, reader: Reading) -> None:
    for number in range(20):
        assert reader.read(served.name, served.address + number, 1) == served.content[number : number + 1]


def test_memory_that_is_not_there_is_an_error_and_the_engine_serves_on(served: Served, reader: Reading) -> None:
    with pytest.raises(EngineError):
        reader.read(served.name, 4096, PIECE_BYTES)

    assert reader.read(served.name, served.address, 1) == served.content[:1]


def test_a_peer_that_is_gone_is_an_error(served: Served, reader: Reading) -> None:
    assert reader.read(served.name, served.address, 1)
    served.engine.kill()

    with pytest.raises(EngineError):
        reader.read(served.name, served.address, 1)


def test_a_frozen_peer_ends_a_read_and_cancels_says_whether_it_may_be_written_later(
    served: Served, reader: Reading
) -> None:
    reader.read(served.name, served.address, 1)  # an engine's first contact asks the metadata store
    started_s = time.monotonic()
    with frozen(served.engine.process.pid):
        with pytest.raises(EngineError):
            reader.read(served.name, served.address, REGION_BYTES)
        assert time.monotonic() - started_s < 15.0
        assert reader.target() == bytes(REGION_BYTES)

    if reader.cancels:
        assert WithTheTcpReader("").read(served.name, served.address, REGION_BYTES) == served.content  # it serves again
        assert reader.target() == bytes(REGION_BYTES)
    else:
        wait_until(lambda: reader.target() == served.content, "the engine wrote what it had given up")
