"""The equality check on a GPU: ``python -m tests.gpu.equality`` (an NVIDIA GPU with 40 GB free, the CUDA pin).

Set-ups of the real CUDA pin, CUDA graphs on: FlashAttention with each transport, xformers with a cache in bfloat16 and in
fp8, and FlashAttention with chunked prefill on the producer and prefix caching on both sides.

The model has the KV shape of an 8B model (36 layers, 8 KV heads, 128 wide,
144 KiB a token) and random weights large enough for a wrong block to show. Every answer of the pair must equal the plain
instance's, and decode must have computed no prompt. Behind a prefix-cache hit vLLM itself is not reproducible to the last bit
(it computes the rest with another kernel), so there the pair must be as near to the plain instance as that one's second
answer is to its first. Then the same for first tokens while another answer runs, which new requests join; what follows is
computed in a batch, with other rounding. Samples (n > 1) are left out for the same reason. Prints one line a set-up; exit
code 1 if one fails. Names of set-ups as arguments run only those.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Sequence

from mooncake_v0.pin.processes import Pair, PairOptions, find_free_port
from mooncake_v0.pin.tiny_model import write_tokenizer
from tests.e2e.asking import ask, counters, exact_content, hits, misses, stream_all, token_prompt

LENGTHS = (1, 15, 16, 17, 100, 128, 511, 512, 1000, 2048, 4096, 8000)
SETUPS: dict[str, tuple[dict[str, str], Sequence[str]]] = {
    "flash_attn": ({"VLLM_ATTENTION_BACKEND": "FLASH_ATTN"}, ()),
    "flash_attn, cuda_ipc": ({"VLLM_ATTENTION_BACKEND": "FLASH_ATTN", "MOONCAKE_V0_TRANSPORT": "cuda_ipc"}, ()),
    "flash_attn, engine": ({"VLLM_ATTENTION_BACKEND": "FLASH_ATTN", "MOONCAKE_V0_TRANSPORT": "engine"}, ()),
    "xformers": ({"VLLM_ATTENTION_BACKEND": "XFORMERS"}, ()),
    "xformers, fp8 kv cache": ({"VLLM_ATTENTION_BACKEND": "XFORMERS"}, ("--kv-cache-dtype", "fp8")),
    "flash_attn, chunked prefill, prefix caching": (
        {"VLLM_ATTENTION_BACKEND": "FLASH_ATTN"},
        ("--enable-prefix-caching",),
    ),
}
CHUNKED = ("--enable-chunked-prefill", "--max-num-batched-tokens", "1024")


def make_model(folder: Path) -> str:
    """Llama with 8B's KV shape and a narrow body, 0.9 GB."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    folder.mkdir(parents=True)
    config = LlamaConfig(
        vocab_size=512, hidden_size=1024, intermediate_size=2048, num_hidden_layers=36, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=16384, initializer_range=0.06,
        tie_word_embeddings=False, torch_dtype="bfloat16", bos_token_id=0, eos_token_id=2,
    )  # fmt: skip
    set_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    write_tokenizer(folder, 16384)
    return str(folder)


def fresh_bodies(model: str, seed: int, max_tokens: int) -> list[dict[str, Any]]:
    kinds: tuple[dict[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.8, "seed": 3})
    return [
        {
            "model": model,
            "prompt": token_prompt(length, seed),
            "max_tokens": max_tokens,
            "logprobs": 3,
            **kinds[index % 2],
        }
        for index, length in enumerate(LENGTHS)
    ]


def make_bodies(model: str) -> list[dict[str, Any]]:
    bodies = fresh_bodies(model, 1, 12)
    # a long common prefix: with prefix caching only the rest is computed, or fetched
    shared = token_prompt(2000, 2)
    bodies += [
        {"model": model, "prompt": shared + token_prompt(more, 3), "max_tokens": 12, "logprobs": 3, "temperature": 0}
        for more in (1, 50, 333)
    ]
    return bodies


def check(name: str, model: str, folder: Path) -> bool:
    environment, both = SETUPS[name]
    chunked = CHUNKED if "chunked" in name else ()
    # a fixed number of blocks: vLLM counts what other processes hold on the GPU as its own
    args = ["--max-model-len", "9000", "--num-gpu-blocks-override", "6000", "--disable-log-requests", *both]
    pair = Pair(PairOptions(model, folder, kv_buffer_size=4e9, vllm_args=args, environment=environment))
    port = find_free_port()
    try:
        pair.wait_ready(pair.start_metadata())
        started = [
            pair.start_plain(port, chunked),
            pair.start_instance("prefill", chunked),
            pair.start_instance("decode"),
        ]
        for process in started:
            pair.wait_ready(process)
        pair.wait_ready(pair.start_proxy())
        pair.wait_connected()
        return compare(name, pair, f"http://127.0.0.1:{port}", make_bodies(model))
    finally:
        pair.stop_all()


def compare(name: str, pair: Pair, plain_url: str, bodies: list[dict[str, Any]]) -> bool:
    """Every answer is equal, or, behind a prefix-cache hit, as near as the plain instance's second answer is to its first."""
    plain, again = ([exact_content(ask(plain_url, body)) for body in bodies] for _ in range(2))
    answers = [exact_content(ask(pair.proxy_url, body)) for body in bodies]
    found = counters(pair)
    shifts = [shift(answer, expected) for answer, expected in zip(answers, plain)]
    own_shift = max(shift(one, other) for one, other in zip(again, plain))
    equal = [answer == expected for answer, expected in zip(answers, plain)]
    joined = ask_beside_another(pair, plain_url, bodies[0]["model"])
    result = {
        "setup": name,
        "prompts": len(bodies),
        "equal": sum(equal),
        "first tokens beside another answer": len(joined),
        "of them equal": sum(joined),
        "that joined": counters(pair).get("filled_ahead", 0.0),
        "largest logprob shift": max(shifts),
        "plain instance's own shift when asked twice": own_shift,
        "hits": hits(found),
        "misses": misses(found),
        "read_gb": round(found.get("read_bytes", 0.0) / 1e9, 2),
        "transport": pair.agent_status("decode").transport,
    }
    print(json.dumps(result), flush=True)
    fresh = all(equal[: len(LENGTHS)])
    return fresh and all(joined) and max(shifts) <= own_shift and hits(found) == len(bodies) and misses(found) == 0


def ask_beside_another(pair: Pair, plain_url: str, model: str) -> list[bool]:
    """For prompts of all lengths, whether the first token and its logprobs are the plain instance's."""
    bodies = fresh_bodies(model, 4, 1)
    long = {"model": model, "prompt": token_prompt(30, 5), "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
    running = threading.Thread(target=lambda: asyncio.run(stream_all(pair.proxy_url, [long])))
    before = hits(counters(pair))
    running.start()
    until_s = time.monotonic() + 60
    while hits(counters(pair)) == before:  # else prefill may compute both prompts in one batch, with other rounding
        if time.monotonic() > until_s:
            raise RuntimeError("the other answer does not begin")
        time.sleep(0.05)
    answers = [exact_content(ask(pair.proxy_url, body)) for body in bodies]
    if not running.is_alive():
        raise RuntimeError("the other answer ended too early")
    running.join()
    return [answer == exact_content(ask(plain_url, body)) for answer, body in zip(answers, bodies)]


def shift(one: list[Any], other: list[Any]) -> float:
    """The largest difference of two answers' token logprobs."""
    pairs = zip(one[0][2]["token_logprobs"], other[0][2]["token_logprobs"])
    return max(abs(a - b) for a, b in pairs)


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        model = make_model(Path(root) / "model")
        good = [check(name, model, Path(root) / f"run{index}") for index, name in enumerate(sys.argv[1:] or SETUPS)]
        shutil.rmtree(model)
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
