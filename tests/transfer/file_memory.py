"""Stands in for a GPU's memory: memory that agents have no access to and that a handle of 64 bytes opens elsewhere.

The real one runs with the pin in tests/gpu/equality.py.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path

import torch

from mooncake_v0.errors import TransferError
from mooncake_v0.transfer.agent_client import DevicePools
from mooncake_v0.transfer.same_host import HANDLE_BYTES


class FileMemory:
    """A file's mapping as a tensor; its name is the handle."""

    def __init__(self, path: Path, nbytes: int, open_ones: list[FileMemory]) -> None:
        self.handle = str(path).encode().ljust(HANDLE_BYTES, b"\0")
        with path.open("r+b") as file:
            self.tensor = torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
        self._open_ones = open_ones
        open_ones.append(self)

    def close(self) -> None:
        self._open_ones.remove(self)


def file_pools(folder: Path, open_ones: list[FileMemory]) -> DevicePools:
    """Pools in files of a folder; open_ones: those that are not closed yet."""

    def allocate(nbytes: int) -> FileMemory:
        number, name = tempfile.mkstemp(dir=folder)
        os.truncate(number, nbytes)
        os.close(number)
        return FileMemory(Path(name), nbytes, open_ones)

    def open_(handle: bytes, nbytes: int) -> FileMemory:
        path = Path(handle.rstrip(b"\0").decode())
        if not path.exists():
            raise TransferError("no such memory")
        return FileMemory(path, nbytes, open_ones)

    return DevicePools(allocate, open_)
