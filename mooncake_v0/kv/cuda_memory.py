"""Pools in the memory of a GPU, shared by processes of one host through CUDA IPC.

The CUDA driver's own functions (libcuda, stable since CUDA 4.1) allocate and share: an allocation of its own holds nothing
but the pool, where torch's allocator would put the pool beside other tensors, all of which a peer could read. The peer's
GPU must be the same one, or one that can reach it (NVLink, PCIe peer to peer) with both visible to its process.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, Callable, Iterator

import torch

from mooncake_v0.errors import TransferError
from mooncake_v0.kv.layout import tensor_at
from mooncake_v0.transfer.agent_client import DevicePools
from mooncake_v0.transfer.same_host import HANDLE_BYTES

_LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = [("bytes", ctypes.c_ubyte * HANDLE_BYTES)]


class _Driver:
    """The functions of libcuda that are used here, in the context that torch uses (the device's primary one)."""

    def __init__(self, device: torch.device) -> None:
        self._library: Any = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        number = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(number), _index(device))
        self._context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), number)

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        with self._current():
            self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def handle(self, address: int) -> bytes:
        handle = _Handle()
        with self._current():
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.bytes)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        with self._current():
            value = _Handle.from_buffer_copy(handle)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), value, _LAZY_ENABLE_PEER_ACCESS)
        return address.value

    def free(self, address: int) -> None:
        with self._current():
            self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def close(self, address: int) -> None:
        with self._current():
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise TransferError(f"{name}: {(text.value or b'').decode() or code}")


class CudaMemory:
    """Device memory outside of torch's allocator, as a tensor. close() once nothing uses the tensor any more."""

    def __init__(
        self, device: torch.device, address: int, nbytes: int, handle: bytes, release: Callable[[int], None]
    ) -> None:
        self.handle = handle
        self._address = address
        self._release = release
        self.tensor = tensor_at(address, nbytes, device)

    def close(self) -> None:
        torch.cuda.synchronize(self.tensor.device)
        self._release(self._address)


def device_pools(device: torch.device) -> DevicePools | None:
    """None where the worker has no NVIDIA GPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    driver = _Driver(device)

    def allocate(nbytes: int) -> CudaMemory:
        try:
            address = driver.allocate(nbytes)
        except TransferError as error:
            free_bytes, _ = torch.cuda.mem_get_info(device)
            raise TransferError(
                f"kv_buffer_size {nbytes} bytes does not fit in the GPU's memory: {free_bytes} bytes are free ({error})",
                fix="lower kv_buffer_size or --gpu-memory-utilization, or do not set MOONCAKE_V0_TRANSPORT=cuda_ipc",
            ) from error
        memory = CudaMemory(device, address, nbytes, driver.handle(address), driver.free)
        memory.tensor.zero_()
        return memory

    def open_(handle: bytes, nbytes: int) -> CudaMemory:
        return CudaMemory(device, driver.open(handle), nbytes, handle, driver.close)

    return DevicePools(allocate, open_)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
