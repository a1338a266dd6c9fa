"""Checks of memory, GPUs and RDMA on this host. Devices, ports and GIDs themselves are judged by validate's online rules."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Iterator

from mooncake_v0.doctor.host import Host
from mooncake_v0.doctor.report import ERROR, INFO, OK, SKIPPED, WARNING, Outcome, check

GIB = 1 << 30
GPU_QUERY = "index,name,memory.total,memory.used"


@check(ERROR)
def host_memory(host: Host) -> Iterator[Outcome]:
    """The lookup buffers do not fit into this host's memory: kv_buffer_size bytes for each rank of each side on it."""
    sides = max(1, len(host.local)) - len(host.running)
    if not sides:
        yield Outcome(SKIPPED, "the lookup buffers are in memory already: the instance runs")
        return
    needed = host.kv_buffer_bytes * host.ranks * sides
    line = next(
        line
        for line in (host.proc / "meminfo").read_text(encoding="ascii").splitlines()
        if line.startswith("MemAvailable")
    )
    available = int(line.split()[1]) * 1024
    if needed > available:
        what = f"the lookup buffers need {_gib(needed)} ({host.ranks} ranks, {sides} side), {_gib(available)} are available"
        fix = "give a smaller kv_buffer_size; `mooncake-v0 size` computes it"
        yield Outcome(ERROR, what, line, fix)
    else:
        yield Outcome(OK, f"the lookup buffers need {_gib(needed)}, {_gib(available)} are available")


@check(WARNING)
def memory_kills(host: Host) -> Iterator[Outcome]:
    """The kernel ended processes because memory ran out. vLLM then only says that its engine process died.

    The count is of the whole host since it booted. Model weights pass through host memory while they are loaded, and the
    lookup buffers stay in it.
    """
    counters = dict(line.split() for line in (host.proc / "vmstat").read_text(encoding="ascii").splitlines())
    number = int(counters.get("oom_kill", "0"))
    if number:
        what = f"the kernel ended {number} processes for lack of memory since this host booted"
        fix = "see which; give the host more memory, or a smaller kv_buffer_size"
        yield Outcome(WARNING, what, f"oom_kill {number}", fix, "dmesg -T | grep -i 'killed process'")
    else:
        yield Outcome(OK, "no process was ended for lack of memory since this host booted")


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi lists it."""

    index: int
    name: str
    total_bytes: int
    used_bytes: int


@check(ERROR)
def gpu_memory(host: Host) -> Iterator[Outcome]:
    """A GPU has less free memory than vLLM will take: --gpu-memory-utilization of the whole.

    vLLM 0.6.4.post1 counts what other processes use against its own share, so it dies out of memory or finds no room for
    its KV cache. The lookup buffer is host memory and not part of it.
    """
    if shutil.which("nvidia-smi", path=host.environment.get("PATH")) is None:
        yield Outcome(SKIPPED, "no nvidia-smi: this host has no NVIDIA GPU, or no driver")
        return
    if host.running:
        yield Outcome(SKIPPED, "an instance of the pair runs here and has its share of the GPU already")
        return
    done = host.run(["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits"], 30)
    if done.code:
        yield Outcome(
            ERROR, f"nvidia-smi fails with exit code {done.code}", done.output.strip()[-300:], "repair the driver"
        )
        return
    for line in done.output.strip().splitlines():
        yield _judge_gpu(_read_gpu(line), host.gpu_memory_utilization, line)


def _read_gpu(line: str) -> Gpu:
    index, name, total_mib, used_mib = (part.strip() for part in line.split(","))
    return Gpu(int(index), name, int(total_mib) << 20, int(used_mib) << 20)


def _judge_gpu(gpu: Gpu, utilization: float, line: str) -> Outcome:
    wanted = int(gpu.total_bytes * utilization)
    free = gpu.total_bytes - gpu.used_bytes
    if wanted <= free:
        return Outcome(OK, f"GPU {gpu.index} ({gpu.name}): {_gib(wanted)} wanted, {_gib(free)} free")
    fits = max(0.0, int(100 * free / gpu.total_bytes - 2) / 100)
    what = f"GPU {gpu.index} has {_gib(free)} free, --gpu-memory-utilization {utilization:g} takes {_gib(wanted)}"
    fix = f"end what uses it, or give --gpu-memory-utilization {fits:g}"
    return Outcome(ERROR, what, line, fix, "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv")


def _gib(number: int) -> str:
    return f"{number / GIB:.1f} GiB"


@check(ERROR)
def rdma_access(host: Host) -> Iterator[Outcome]:
    """RDMA is configured, but this process may not use the devices: /dev/infiniband is not in the container."""
    if host.config is None or host.config.protocol != "rdma":
        yield Outcome(SKIPPED, "mooncake.json does not say rdma")
        return
    devices = sorted(path.name for path in (host.sys / "class/infiniband_verbs").glob("uverbs*"))
    nodes = host.proc.parent / "dev/infiniband"
    absent = [name for name in devices if not (nodes / name).exists()]
    if not devices:
        yield Outcome(
            ERROR,
            "the kernel has no RDMA device",
            str(host.sys),
            'load its driver, or use "protocol": "tcp"',
            "rdma link",
        )
    elif absent:
        what = f"/dev/infiniband/{absent[0]} is not here, though the kernel has the device"
        fix = "give the container its devices: --device=/dev/infiniband --ulimit memlock=-1 --network=host (docker)"
        yield Outcome(ERROR, what, f"of {len(devices)} in {host.sys}/class/infiniband_verbs", fix)
    else:
        yield Outcome(OK, f"/dev/infiniband has {', '.join(devices)}")


@check(INFO)
def nvidia_peermem(host: Host) -> Iterator[Outcome]:
    """nvidia_peermem lets RDMA devices read GPU memory. This package does not need it: its pool is host memory.

    Stock connectors, which register GPU memory with the engine, fail without it (return code -202).
    """
    list_of_modules = host.proc / "modules"
    modules = [line.split()[0] for line in list_of_modules.read_text().splitlines()] if list_of_modules.exists() else []
    if host.config is None or host.config.protocol != "rdma" or "nvidia" not in modules:
        yield Outcome(SKIPPED, "no RDMA with an NVIDIA GPU here")
    elif "nvidia_peermem" in modules:
        yield Outcome(OK, "nvidia_peermem is loaded")
    else:
        yield Outcome(
            INFO,
            "nvidia_peermem is not loaded",
            "",
            "nothing, for this package; stock connectors need it",
            "modprobe nvidia_peermem",
        )
