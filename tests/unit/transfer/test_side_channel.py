from __future__ import annotations

from typing import Iterator

import pytest
import zmq

from mooncake_v0.errors import TransferError
from mooncake_v0.pin.processes import find_free_port
from mooncake_v0.transfer.messages import Ping
from mooncake_v0.transfer.side_channel import SideChannel, resolve


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made


def wait_for_message(channel: SideChannel) -> Ping:
    assert channel.listener is not None
    assert channel.listener.poll(5000), "nothing arrived"
    ((_, message),) = channel.receive()
    assert isinstance(message, Ping)
    return message


def test_a_peer_that_moved_is_followed(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    port = find_free_port()
    here, there, caller = (SideChannel(context) for _ in range(3))
    here.bind("127.0.0.1", port)
    there.bind("127.0.0.2", port)
    caller.dial("127.0.0.1", port)
    caller.send(Ping("first"))
    assert wait_for_message(here) == Ping("first")

    caller.follow("127.0.0.2", port)
    caller.send(Ping("second"))

    assert wait_for_message(there) == Ping("second")
    for channel in (here, there, caller):
        channel.close()


def test_following_an_unchanged_address_keeps_the_connection(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    port = find_free_port()
    here, caller = SideChannel(context), SideChannel(context)
    here.bind("127.0.0.1", port)
    caller.dial("127.0.0.1", port)

    caller.follow("127.0.0.1", port)
    caller.send(Ping("first"))

    assert wait_for_message(here) == Ping("first")
    for channel in (here, caller):
        channel.close()


def test_an_address_that_is_taken_or_not_ours_is_named(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    port = find_free_port()
    first, second = SideChannel(context), SideChannel(context)
    first.bind("127.0.0.1", port)

    with pytest.raises(TransferError, match=f"127.0.0.1:{port} is taken"):
        second.bind("127.0.0.1", port)
    with pytest.raises(TransferError, match="192.0.2.1:.* cannot be bound"):
        second.bind("192.0.2.1", port)

    first.close()


def test_a_host_without_an_address_is_named() -> None:
    with pytest.raises(TransferError, match="nowhere.invalid"):
        resolve("nowhere.invalid")
