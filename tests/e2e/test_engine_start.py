"""A server whose patience ends as the engine's answer comes asks again, and is answered (vllm_plugin/engine_start.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mooncake_v0.pin.processes import find_free_range
from tests.e2e.conftest import ENVIRONMENT

# the real engine process and the real client, put together as in vLLM's entrypoints/openai/api_server.py
START = """
import asyncio, json, multiprocessing, pickle, sys
from vllm import AsyncEngineArgs, SamplingParams
from vllm.engine.multiprocessing import RPCStartupRequest
from vllm.engine.multiprocessing.client import MQLLMEngineClient
from vllm.engine.multiprocessing.engine import run_mp_engine
from vllm.usage.usage_lib import UsageContext
from vllm.utils import get_open_zmq_ipc_path

WITHIN_MS = 120_000

async def give_up_as_the_answer_comes(client):
    # the client's own socket, closed unread: what setup leaves behind when its time is over
    with client.get_data_socket() as socket:
        await socket.send_multipart((pickle.dumps(RPCStartupRequest.IS_SERVER_READY),))
        assert await socket.poll(timeout=WITHIN_MS), "the engine never answered"

async def is_set_up(client):
    try:
        await client.setup()
    except TimeoutError:
        return False
    return True

async def use(client):
    await give_up_as_the_answer_comes(client)
    if not await is_set_up(client):
        return {"set_up": False}
    client.health_loop.cancel()  # it would read the heartbeat that is looked for here
    beats = bool(await client.heartbeat_socket.poll(timeout=WITHIN_MS))
    parameters = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    async for output in client.generate("a prompt", parameters, request_id="1"):
        tokens = len(output.outputs[0].token_ids)
    return {"set_up": True, "beats": beats, "tokens": tokens}

async def serve(arguments, config, ipc, pid):
    client = await asyncio.get_running_loop().run_in_executor(None, MQLLMEngineClient, ipc, config, pid)
    try:
        return await use(client)
    finally:
        client.close()

def main():
    extra = {"kv_transfer_config": json.loads(sys.argv[2])} if len(sys.argv) > 2 else {}
    arguments = AsyncEngineArgs(sys.argv[1], dtype="float32", max_model_len=1024, **extra)
    spawn, ipc = multiprocessing.get_context("spawn"), get_open_zmq_ipc_path()
    alive = spawn.Value("b", True, lock=False)
    engine = spawn.Process(target=run_mp_engine, args=(arguments, UsageContext.OPENAI_API_SERVER, ipc, alive))
    engine.start()
    try:
        result = asyncio.run(serve(arguments, arguments.create_engine_config(), ipc, engine.pid))
    finally:
        engine.terminate()
        engine.join()
    print("RESULT", json.dumps({**result, "exit": engine.exitcode}))

if __name__ == "__main__":
    main()
"""


def start(folder: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    """What became of the second try, and of a request after it."""
    script = folder / "start.py"
    script.write_text(START)
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, **ENVIRONMENT, "VLLM_RPC_TIMEOUT": "3000", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result


def test_the_pin_alone_never_answers_a_server_that_missed_its_only_answer(tiny_model: str, tmp_path: Path) -> None:
    assert start(tmp_path, tiny_model) == {"set_up": False, "exit": 0}


def test_with_a_transfer_the_server_is_answered_again_and_the_engine_beats_and_serves(
    tiny_model: str, tmp_path: Path
) -> None:
    base = find_free_range(150)
    path = tmp_path / "mooncake.json"
    urls = {"prefill_url": f"127.0.0.1:{base}", "decode_url": f"127.0.0.1:{base}"}
    path.write_text(json.dumps({**urls, "metadata_server": "http://127.0.0.1:9/metadata", "protocol": "tcp"}))
    transfer = {"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer", "kv_rank": 1, "kv_parallel_size": 2}
    argument = json.dumps({**transfer, "kv_buffer_size": 1e7})

    result = start(tmp_path, tiny_model, argument, MOONCAKE_CONFIG_PATH=str(path))

    assert result == {"set_up": True, "beats": True, "tokens": 4, "exit": 0}
