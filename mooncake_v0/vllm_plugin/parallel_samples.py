"""Mends the end of streams with several samples (n > 1), of which the pin drops a part.

vLLM 0.6.4.post1 hands out a step's tokens of all samples when it comes to the first of them (sequence.py:1393,
ParallelSampleSequenceGroup.maybe_assemble_group). Once that one has ended it is not scheduled any more, and what the others
still generate reaches nobody. Here any sample hands out what none has before. Called only where a KV transfer is configured.
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
        assembled = original(self, seq_group)
        if assembled is not None or not self.streaming:
            return assembled
        first = next(name for name, index in self.seq_id_to_index.items() if index == 0)
        if first in self.to_be_finished:
            return None  # it hands out this step's tokens
        samples = self.assembled_seq_group.seqs
        is_new = any(sample.get_output_len() > sample._last_output_token_ids_offset for sample in samples)
        return self.assembled_seq_group if is_new else None

    return maybe_assemble_group
