"""The border to the pinned engine: the only importer of `mooncake`. One object per agent process.

The engine reports failures as return codes and by what it does not publish; here they become EngineError. It must be
used from one thread: its http client is not thread-safe (mooncake-transfer-engine 0.3.3.post2,
transfer_metadata_plugin.cpp:275), and a waiting transfer burns a core.

Data moves by reads only, over tcp those of `TcpReader`. A WRITE over tcp is acknowledged before the bytes arrive
(tcp_transport.cpp:123).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from dataclasses import dataclass
from typing import Any, Mapping
from urllib.parse import urlsplit

from mooncake_v0 import ENGINE_VERSIONS
from mooncake_v0.errors import EngineError, UnsupportedError

# The engine's own limit for one transfer; 5 s is its minimum. The agent's deadlines are shorter (transfer_engine_py.cpp).
TRANSFER_TIMEOUT_S = 5

# A device filter that matches no RDMA device: it makes the engine take tcp on a host that has some (topology.cpp:63).
NO_RDMA_DEVICE = "mooncake-v0-tcp-only"


@dataclass(frozen=True)
class EngineSettings:
    """What one engine needs to know.

    segment_name: host:port; with legacy binding the engine listens there and on port + 1
    metadata_url: a URL that this engine can take, see `engine_takes`
    """

    segment_name: str
    metadata_url: str
    protocol: str
    device_names: tuple[str, ...] = ()


def engine_environment(environment: Mapping[str, str], metadata_url: str) -> dict[str, str]:
    """The environment in which the engine may be imported; it reads most of it at import and dies on bad values.

    Legacy binding makes the configured host:port what is really bound and lets peers find a restarted one again. libcurl
    honours http_proxy, so the metadata host is exempted.
    """
    env = dict(environment)
    env["MC_LEGACY_RPC_PORT_BINDING"] = "1"
    env["MC_TRANSFER_TIMEOUT"] = str(TRANSFER_TIMEOUT_S)
    env.setdefault("MC_LOG_LEVEL", "ERROR")
    for name in ("MC_TCP_BIND_ADDRESS", "MC_USE_IPV6"):
        env.pop(name, None)  # both change the advertised address to one that is not the configured one
    host = urlsplit(metadata_url).hostname or ""
    exempt = ",".join(filter(None, (env.get("no_proxy") or env.get("NO_PROXY"), host, "127.0.0.1", "localhost")))
    env["no_proxy"] = env["NO_PROXY"] = exempt
    return env


def engine_takes(metadata_url: str) -> bool:
    """Whether the pinned engine can use this URL itself; all others go through a private gateway.

    It takes http with a path, and a single etcd endpoint without credentials. https needs the system's CA store and
    redis:// or an unknown scheme abort the process (transfer_metadata_plugin.cpp:442).
    """
    url = urlsplit(metadata_url)
    if url.scheme == "http":
        return bool(url.path.strip("/")) and not url.query and not url.fragment
    return url.scheme == "etcd" and "@" not in url.netloc and "," not in url.netloc and not url.path.strip("/")


def check_engine_version() -> str:
    """The installed engine's version; UnsupportedError unless it is one of the tested ones."""
    try:
        version = importlib.metadata.version("mooncake-transfer-engine")
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError(
            "the package mooncake-transfer-engine is not installed",
            fix=f"pip install mooncake-transfer-engine=={ENGINE_VERSIONS[-1]}",
        ) from None
    if version not in ENGINE_VERSIONS:
        raise UnsupportedError(
            f"mooncake-transfer-engine {version} is not one of the tested versions {', '.join(ENGINE_VERSIONS)}",
            fix=f"pip install mooncake-transfer-engine=={ENGINE_VERSIONS[-1]}",
        )
    return version


class MooncakeEngine:
    """An initialised engine with one registered region; closing it removes its keys from the metadata store."""

    cancels = False

    def __init__(self, settings: EngineSettings, region_address: int, region_nbytes: int) -> None:
        """Start the engine and publish the region. Takes milliseconds, or up to 5 s when etcd does not answer.

        Raises EngineError with the reason as far as the engine gives one. A failed engine object segfaults when it is
        used (facts of 0.3.3.post2), so it is dropped at once.
        """
        if not engine_takes(settings.metadata_url):
            raise EngineError(f"the engine cannot use the metadata URL scheme of {_masked(settings.metadata_url)}")
        check_engine_version()
        os.environ.update(engine_environment(os.environ, settings.metadata_url))
        from mooncake.engine import TransferEngine

        devices = ",".join(settings.device_names) if settings.protocol == "rdma" else NO_RDMA_DEVICE
        self.settings = settings
        self._region = (region_address, region_nbytes)
        engine: Any = TransferEngine()
        try:
            code = engine.initialize(settings.segment_name, settings.metadata_url, settings.protocol, devices)
        except RuntimeError as error:
            raise EngineError(
                f"the engine cannot start as {settings.segment_name}: {error}",
                fix="check that this host owns the address and that the port and the next one are free",
            ) from error
        if code != 0:
            raise EngineError(
                f"the engine cannot start as {settings.segment_name}: initialize returned {code}",
                fix=f"check that the metadata server {_masked(settings.metadata_url)} answers",
            )
        code = engine.register_memory(region_address, region_nbytes)
        if code != 0:
            raise EngineError(
                f"the engine cannot register {region_nbytes} bytes: register_memory returned {code}",
                fix="for rdma, raise the memlock limit to the buffer plus 2 GiB; check the metadata server",
            )
        self._engine = engine

    def read(self, segment_name: str, local_address: int, remote_address: int, nbytes: int) -> None:
        """Copy nbytes from a peer's memory into ours; returns when all bytes are here.

        Raises EngineError. After a time-out the bytes may still arrive later: the region must not be reused.
        """
        assert nbytes > 0, "a read of no bytes aborts the process on rdma"
        try:
            code = self._engine.transfer_sync_read(segment_name, local_address, remote_address, nbytes)
        except RuntimeError as error:  # a value of the wrong JSON type under the peer's key
            raise EngineError(
                f"read from segment {segment_name!r} failed: {error}", fix="run `mooncake-v0 metadata check`"
            ) from error
        if code != 0:
            raise EngineError(
                f"read of {nbytes} bytes from segment {segment_name!r} failed: engine returned {code}",
                fix=f"check that the peer runs and that mooncake/ram/{segment_name} is in the metadata store",
            )

    def close(self) -> None:
        """Stop the engine; its destructor deletes its keys."""
        self._engine = None


def check_descriptor(value: bytes | None, settings: EngineSettings) -> None:
    """Require that what the engine published is what was configured, since it returns 0 either way.

    value: what the metadata store holds under mooncake/ram/<segment name>. Raises EngineError.
    """
    if value is None:
        raise EngineError(
            f"the metadata store has no descriptor of {settings.segment_name} although the engine started"
        )
    try:
        descriptor = json.loads(value)
        protocol, devices = descriptor["protocol"], [device["name"] for device in descriptor.get("devices", [])]
        buffers = descriptor["buffers"]
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"the descriptor of {settings.segment_name} is not readable: {error}") from error
    if protocol != settings.protocol:
        raise EngineError(
            f"protocol {settings.protocol!r} is configured, but the engine took {protocol!r}",
            fix="check that the RDMA devices exist and are active, or configure protocol tcp",
        )
    missing = [name for name in settings.device_names if name not in devices]
    if settings.protocol == "rdma" and (missing or not all(buffer.get("rkey") for buffer in buffers)):
        raise EngineError(
            f"the engine opened the devices {devices}, configured are {list(settings.device_names)}",
            fix="check device_name against /sys/class/infiniband and the state of each port",
        )


def _masked(url: str) -> str:
    split = urlsplit(url)
    if "@" not in split.netloc:
        return url
    return split._replace(netloc="***@" + split.netloc.rsplit("@", 1)[1]).geturl()
