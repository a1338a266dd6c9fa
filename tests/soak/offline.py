"""One `LLM` for `tests.soak.equality`: ``python -m tests.soak.offline MODEL [ROLE]``

For each line of standard input, a JSON list of prompts, it answers every prompt once for each of SAMPLING, which holds what
a server's request cannot express, and prints one JSON object: name → [[token ids, log probabilities], …].
"""

from __future__ import annotations

import json
import sys
from typing import Any, Callable

import torch


def only_even(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logit processor without a state: odd tokens never."""
    logits[1::2] = -float("inf")
    return logits


def after_the_prompt(prompt: tuple[int, ...], tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logit processor that is given the prompt: its first token becomes likelier with every step."""
    logits[prompt[0]] += len(tokens)
    return logits


SAMPLING: dict[str, Callable[[], dict[str, Any]]] = {
    "bad words": lambda: {"bad_words": ["e", " t", "s", "ae"]},
    "logit processor": lambda: {"logits_processors": [only_even]},
    "logit processor with prompt": lambda: {"logits_processors": [after_the_prompt]},
    "both, sampled": lambda: {"bad_words": ["e"], "logits_processors": [only_even], "temperature": 0.8, "seed": 3},
}


def answer(llm: Any, prompts: list[list[int]], fields: dict[str, Any]) -> list[Any]:
    """One prompt at a time, so that every engine computes the same batches."""
    from vllm import SamplingParams

    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 12, "logprobs": 2, "ignore_eos": True, **fields})
    found = []
    for prompt in prompts:
        (output,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs
        chosen = [step[token].logprob for step, token in zip(output.logprobs, output.token_ids)]
        found.append([list(output.token_ids), chosen])
    return found


def main(model: str, role: str) -> None:
    from vllm import LLM

    transfer: dict[str, Any] = {}
    if role:
        rank = int(role == "kv_consumer")
        names = {"kv_connector": "MooncakeConnector", "kv_role": role, "kv_rank": rank, "kv_parallel_size": 2}
        transfer = {"kv_transfer_config": {**names, "kv_buffer_size": 1e8}}
    llm = LLM(model, dtype="float32", max_model_len=2048, **transfer)
    for line in sys.stdin:
        prompts = json.loads(line)
        print(json.dumps({name: answer(llm, prompts, make()) for name, make in SAMPLING.items()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
