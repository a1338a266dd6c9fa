"""What one engine step has to transfer, decided by the driver and sent to the other ranks with the model input."""

from __future__ import annotations

import hashlib
from array import array

import msgspec

from mooncake_v0.transfer.messages import KEY_BYTES


class PromptPlan(msgspec.Struct, frozen=True):
    """One prompt of the batch whose KV can be stored or received.

    key:           content address, see `content_key`
    block_ids:     the sequence's whole block table, int32 as bytes
    first_missing: index of the first block that the local prefix cache does not hold
    hidden_row:    row of the prompt's last token in the batch's hidden states
    num_tokens:    length of the prompt
    """

    key: bytes
    block_ids: bytes
    first_missing: int
    hidden_row: int
    num_tokens: int


class TransferPlan(msgspec.Struct, frozen=True):
    """num_rows: rows of the batch's hidden states; complete: every sequence of the batch is in `prompts`."""

    prompts: list[PromptPlan]
    num_rows: int
    complete: bool


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(TransferPlan)


def encode_plan(plan: TransferPlan) -> bytes:
    return _encoder.encode(plan)


def decode_plan(data: bytes) -> TransferPlan:
    return _decoder.decode(data)


def content_key(fingerprint: bytes, adapter: bytes, prompt_token_ids: array[int]) -> bytes:
    """The address of a prompt's KV: equal exactly for the same model, adapters and token ids.

    The whole prompt, never a prefix. blake2b, 16 bytes: two different prompts collide with probability 2^-64 only after
    2^32 entries.
    """
    digest = hashlib.blake2b(fingerprint, digest_size=KEY_BYTES)
    digest.update(len(adapter).to_bytes(4, "little"))
    digest.update(adapter)
    digest.update(prompt_token_ids.tobytes())
    return digest.digest()
