"""Entry points: called by torch at the end of its import, and by vLLM when it loads its general plugins.

PyTorch 2.5 and later calls every `torch.backends` entry point (torch/__init__.py, _import_device_backends). This is the
only moment before vLLM parses its command line at which a package beside the untouched wheel gets to run. Nothing is
patched here: a post-import hook on `vllm.engine.llm_engine` does it, once that module is complete. (`vllm/__init__`
imports `vllm.engine.arg_utils` first and that imports torch, so arg_utils itself is half-initialised now.)

Must never raise: an exception here would make `import torch` fail.
"""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from types import ModuleType

from mooncake_v0 import VLLM_VERSION

logger = logging.getLogger(__name__)

_registered = False


def autoload() -> None:
    """Register the post-import hooks if a supported vLLM is installed. Idempotent."""
    global _registered
    if _registered or not _supported_vllm():
        return
    _registered = True
    import wrapt

    wrapt.register_post_import_hook(_patch_engine, "vllm.engine.llm_engine")
    wrapt.register_post_import_hook(_patch_worker_base, "vllm.worker.worker_base")


def general_plugin() -> None:
    """The second way in: vLLM calls it in the engine's and in every worker's process, several times.

    Needed where TORCH_DEVICE_BACKEND_AUTOLOAD=0 has switched the first one off; too late for the command line, but in
    time for ``LLM(kv_transfer_config=…)`` built after it and for the workers.
    """
    autoload()
    for name, patch in (
        ("vllm.engine.llm_engine", _patch_engine),
        ("vllm.worker.worker_base", _patch_worker_base),
    ):
        if name in sys.modules:
            patch(sys.modules[name])


def _supported_vllm() -> bool:
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return version.split("+")[0] == VLLM_VERSION


def _patch_engine(module: ModuleType) -> None:
    from mooncake_v0.vllm_plugin.engine_args import patch_engine_args
    from mooncake_v0.vllm_plugin.worker_hooks import patch_llm_engine

    patch_engine_args()
    patch_llm_engine()


def _patch_worker_base(module: ModuleType) -> None:
    from mooncake_v0.vllm_plugin.worker_hooks import patch_worker_wrapper

    patch_worker_wrapper()
