"""Stands in for Intel's extension, which vLLM 0.6.4.post1 calls for one thing on CPUs: the all-reduce of tensor parallelism
(distributed/parallel_state.py). The extension itself has no build for torch 2.5.1's default wheel."""

from intel_extension_for_pytorch import distributed as distributed
