"""Mends one fault of the pin that can keep an instance from ever listening.

vLLM 0.6.4.post1's engine answers one start-up request and closes the socket (engine/multiprocessing/engine.py:158). The API
server waits VLLM_RPC_TIMEOUT for an answer, drops its socket and asks again (entrypoints/openai/api_server.py:205). When the
only answer comes just as a try is given up, or is still unsent when the socket closes, nobody answers any later try: the
server asks for ever and never listens. Here the engine goes on answering until the first request of a server that has
started. Called only where a KV transfer is configured.
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator

from mooncake_v0.vllm_plugin.wrapping import wrap_once


def patch_engine_start() -> None:
    """Wrap MQLLMEngine.run_startup_loop; safe to call again."""
    from vllm.engine.multiprocessing.engine import MQLLMEngine

    wrap_once(MQLLMEngine, "run_startup_loop", _until_first_input)


def _until_first_input(answer_one: Callable[..., None]) -> Callable[..., None]:
    def run_startup_loop(self: Any) -> None:
        import zmq
        from vllm.engine.multiprocessing.engine import POLLING_TIMEOUT_MS

        with _one_data_socket(self) as socket:
            answer_one(self)  # waits as the pin does: before a server is connected, a heartbeat would block
            poller = zmq.Poller()
            poller.register(socket, zmq.POLLIN)
            poller.register(self.input_socket, zmq.POLLIN)
            while True:
                ready = dict(poller.poll(POLLING_TIMEOUT_MS))
                if self.input_socket in ready:
                    return  # read by the engine's loop, which follows
                if socket in ready:
                    answer_one(self)
                else:
                    _idle(self)

    return run_startup_loop


@contextlib.contextmanager
def _one_data_socket(engine: Any) -> Iterator[Any]:
    """The socket of the start-up requests, open for all of them: the pin's answer_one uses it and cannot close it."""
    with engine.make_data_socket() as socket:
        engine.make_data_socket = lambda: contextlib.nullcontext(socket)
        try:
            yield socket
        finally:
            del engine.make_data_socket


def _idle(engine: Any) -> None:
    """What the engine's own loop does when it had nothing to do for POLLING_TIMEOUT_MS."""
    engine._health_check()
    engine.engine.do_log_stats()
