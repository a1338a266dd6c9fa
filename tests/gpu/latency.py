"""The user's latency on a GPU: ``python -m tests.gpu.latency FOLDER [TRANSPORT …]`` (an NVIDIA GPU with 120 GB).

For each transport (default: cuda_ipc, shm, engine) `mooncake-v0 bench serve` starts a pair and a plain instance of an
8B-shaped model (36 layers, 8 KV heads, 128 wide: 144 KiB a token) with dummy weights on one GPU, CUDA graphs on, sends the
same prompts of 128 to 32,768 tokens to both, and measures the pace of running answers while prompts of 16,384 tokens keep
arriving. Where there is a second GPU, prefill has it to itself (and cuda_ipc is a copy from GPU to GPU). FOLDER gets the
reports and the servers' logs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from mooncake_v0.pin.tiny_model import write_tokenizer

MAX_MODEL_LEN = 32_800
TRANSPORTS = ("cuda_ipc", "shm", "engine")
VLLM_ARGS = (
    "--load-format=dummy",
    f"--max-model-len={MAX_MODEL_LEN}",
    f"--max-num-batched-tokens={MAX_MODEL_LEN}",
    "--enable-chunked-prefill=False",
    f"--max-seq-len-to-capture={MAX_MODEL_LEN}",
    "--max-num-seqs=16",
    "--num-gpu-blocks-override=5000",
)


def make_model(folder: Path) -> Path:
    """The configuration and a tokenizer; vLLM makes up the weights."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=512, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=65536, tie_word_embeddings=False,
        torch_dtype="bfloat16", bos_token_id=0, eos_token_id=2, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    write_tokenizer(folder, 65536)
    return folder


def run(model: Path, folder: Path, transport: str) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "mooncake_v0", "bench", "serve", "--start", str(model), "--folder", str(folder)]
    command += ["--prompt-tokens", "128,512,1024,2048,4096,8192,16384,32768", "--requests", "9", "--output-tokens", "8"]
    command += ["--rates", "none", "--pace-prompt-tokens", "16384", "--kv-buffer-size", "10e9", "--seed", "1"]
    command += [f"--vllm-arg={argument}" for argument in VLLM_ARGS]
    command += ["--json", str(folder.parent / f"serve-{transport}.json")]
    if torch.cuda.device_count() > 1:  # each sees both, so that one can open the other's memory; it uses the first
        command += ["--prefill-gpus", "1,0", "--decode-gpus", "0,1"]
    environment = {**os.environ, "MOONCAKE_V0_TRANSPORT": transport}
    return subprocess.run(command, env=environment, check=False).returncode


def main() -> None:
    folder = Path(sys.argv[1])
    model = make_model(folder / "model")
    codes = [run(model, folder / transport, transport) for transport in sys.argv[2:] or TRANSPORTS]
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
