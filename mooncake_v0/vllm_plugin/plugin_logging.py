"""Our log lines beside vLLM's, in its format and at its level (VLLM_LOGGING_LEVEL)."""

from __future__ import annotations

import logging


def set_up_logging() -> None:
    """Give the package's logger vLLM's handlers. Called only where a KV transfer is configured."""
    vllm_logger, ours = logging.getLogger("vllm"), logging.getLogger("mooncake_v0")
    if vllm_logger.handlers and not ours.handlers:
        for handler in vllm_logger.handlers:
            ours.addHandler(handler)
        ours.setLevel(vllm_logger.level)
        ours.propagate = False
