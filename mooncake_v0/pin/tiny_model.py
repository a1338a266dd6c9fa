"""A tiny random Qwen2 with a tokenizer and a chat template, written to a folder in a second.

`demo` and the tests serve it. Its weights are drawn with ``initializer_range`` 0.1, so that its greedy output changes
completely when one prompt token changes: a wrong KV block cannot hide (with the usual 0.02 it repeats one token).
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

VOCAB_SIZE = 512
CPU_DTYPE = "float32"  # bfloat16 is twenty times slower on processors without avx512_bf16 or amx
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(
    folder: Path, *, max_tokens: int = 32768, seed: int = 0, layers: int = 4, heads: int = 4, kv_heads: int = 2
) -> Path:
    """Write config, weights and tokenizer of a tiny model to `folder`, unless they are there; return it.

    Head size 64, hidden size 64 * heads, vocabulary 512, bfloat16; the default has 2 KiB of KV a token.
    """
    done = folder / f"made-{max_tokens}-{seed}-{layers}-{heads}-{kv_heads}"
    if done.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, max_tokens)
    _write_weights(folder, max_tokens, seed, layers, heads, kv_heads)
    done.touch()
    return folder


def _write_weights(folder: Path, max_tokens: int, seed: int, layers: int, heads: int, kv_heads: int) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM, set_seed

    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64 * heads,
        intermediate_size=128 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_tokens,
        initializer_range=0.1,
        tie_word_embeddings=False,
        torch_dtype="bfloat16",
        bos_token_id=0,
        eos_token_id=2,
    )
    set_seed(seed)
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)


def write_tokenizer(folder: Path, max_tokens: int) -> None:
    """A byte-level BPE tokenizer of 512 tokens with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [*"etaoinshrdlucm", "\u0120"]  # U+0120 is the byte-level alphabet's space
    pairs = list(itertools.product(letters, letters))
    merges = pairs[: VOCAB_SIZE - len(SPECIAL_TOKENS) - len(alphabet)]
    words = [*SPECIAL_TOKENS, *alphabet, *(a + b for a, b in merges)]
    words += [f"<|unused{i}|>" for i in range(VOCAB_SIZE - len(words))]
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": None,
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "chat_template": CHAT_TEMPLATE,
                "model_max_length": max_tokens,
            }
        )
    )
