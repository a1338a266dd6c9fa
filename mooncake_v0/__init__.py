"""Maintenance package for pinned vLLM V0 prefill/decode deployments on the Mooncake transfer engine.

Importing this package imports nothing else: ``validate``, ``proxy``, ``metadata`` and ``migrate`` run on a machine
with neither torch, vLLM nor the engine, and the ``torch.backends`` entry point runs at the end of ``import torch``.
"""

__version__ = "0.1.0"

VLLM_VERSION = "0.6.4.post1"
ENGINE_VERSIONS = ("0.3.3.post1", "0.3.3.post2")
