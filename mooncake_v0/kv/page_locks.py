"""Page-locks a pool where there is a GPU, which then copies straight from and to it."""

from __future__ import annotations

import logging
from typing import Any

import torch

from mooncake_v0.transfer.agent_client import PageLocks
from mooncake_v0.transfer.pool import Pool

logger = logging.getLogger(__name__)


def page_locks(device: torch.device) -> PageLocks:
    """Without a lock (the limit is too low, say) copies go through a bounce buffer: slower, and logged."""
    if device.type != "cuda":
        return PageLocks()
    runtime: Any = torch.cuda

    def lock(pool: Pool) -> None:
        try:
            with torch.cuda.device(device):
                code = int(runtime.cudart().cudaHostRegister(pool.address, pool.nbytes, 0))
        except RuntimeError as error:
            code, problem = -1, str(error)
        else:
            problem = f"CUDA error {code}"
        if code != 0:
            logger.warning("a pool of %d bytes cannot be page-locked (%s): copies are slower", pool.nbytes, problem)

    def unlock(pool: Pool) -> None:
        with torch.cuda.device(device):
            runtime.cudart().cudaHostUnregister(pool.address)

    return PageLocks(lock, unlock)
