"""Ask a running agent for its state, over its side channel."""

from __future__ import annotations

import zmq

from mooncake_v0.errors import AgentUnavailableError
from mooncake_v0.transfer.messages import Status, StatusRequest, decode_peer, encode
from mooncake_v0.transfer.side_channel import SideChannel


def query_status(host: str, port: int, *, timeout_s: float = 2.0, secret: bytes | None = None) -> Status:
    """The agent's Status. Raises AgentUnavailableError if nothing answers at host:port in time."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    channel = SideChannel(context, secret=secret)
    try:
        channel.dial(host, port)
        assert channel.dialer is not None
        channel.dialer.send(encode(StatusRequest()))
        if channel.dialer.poll(int(timeout_s * 1000)):
            answer = decode_peer(channel.dialer.recv())
            if isinstance(answer, Status):
                return answer
    finally:
        channel.close()
        context.term()
    raise AgentUnavailableError(
        f"no agent answers at {host}:{port} within {timeout_s:.0f} s",
        fix="check that the instance runs, and the shared secret if there is one",
    )
