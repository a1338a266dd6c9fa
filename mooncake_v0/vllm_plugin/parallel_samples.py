"""Mends the end of streams with several samples (n > 1), of which the pin drops a part.

vLLM 0.6.4.post1 hands out a step's tokens of all samples when it comes to the first of them (sequence.py:1393,
ParallelSampleSequenceGroup.maybe_assemble_group), and takes the whole for finished when that one is (sequence.py:826). What
the others still generate reaches nobody. Here any sample hands out what none has before, and the end is the last one's.
Called only where a KV transfer is configured.
"""

from __future__ import annotations

from typing import Any, Callable

from mooncake_v0.vllm_plugin.wrapping import wrap_once


def patch_parallel_samples() -> None:
    """Wrap ParallelSampleSequenceGroup.maybe_assemble_group; safe to call again."""
    from vllm.sequence import ParallelSampleSequenceGroup

    wrap_once(ParallelSampleSequenceGroup, "maybe_assemble_group", _to_the_end)


def _to_the_end(original: Callable[..., Any]) -> Callable[..., Any]:
    def maybe_assemble_group(self: Any, seq_group: Any) -> Any:
        if not self.streaming:
            return original(self, seq_group)
        assembled = self.assembled_seq_group
        assembled.is_finished = lambda: all(sample.is_finished() for sample in assembled.seqs)
        first = next(name for name, index in self.seq_id_to_index.items() if index == 0)
        if seq_group.request_id == first:
            return assembled
        if first in self.to_be_finished:
            return None  # it hands out this step's tokens
        is_new = any(sample.get_output_len() > sample._last_output_token_ids_offset for sample in assembled.seqs)
        return assembled if is_new else None

    return maybe_assemble_group
