"""What a host's sysfs says about RDMA devices, as the engine will find them. No library, no privileges.

Read by `validate --online` and usable by any other check of a host. `root` is /sys, or a copy of it in a test. The rules
of the engine's choice of a GID are those of 0.3.3.post2, rdma_context.cpp.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

DEVICES = Path("class/infiniband")
ROCE_V2 = "RoCE v2"


@dataclass(frozen=True)
class Gid:
    """One entry of a port's GID table. kind: "RoCE v2", "IB/RoCE v1" or "" if the driver does not say."""

    index: int
    address: str
    kind: str

    @property
    def is_null(self) -> bool:
        return set(self.address) <= {"0", ":"}

    @property
    def ipv4(self) -> str | None:
        """The IPv4 address in an IPv4-mapped GID, else None."""
        try:
            mapped: Optional[ipaddress.IPv4Address] = ipaddress.IPv6Address(self.address).ipv4_mapped
        except ValueError:
            return None
        return str(mapped) if mapped is not None else None


@dataclass(frozen=True)
class RdmaPort:
    """One port of a device. state as in sysfs, "4: ACTIVE"; link_layer "Ethernet" (RoCE) or "InfiniBand"."""

    device: str
    port: int
    state: str
    link_layer: str
    gids: tuple[Gid, ...]

    @property
    def is_active(self) -> bool:
        return self.state.startswith("4:") or self.state.upper().endswith("ACTIVE")


def device_names(root: Path) -> list[str]:
    """The RDMA devices of the host, sorted; none without the drivers."""
    try:
        return sorted(entry.name for entry in (root / DEVICES).iterdir())
    except OSError:
        return []


def read_port(root: Path, device: str, port: int) -> RdmaPort | None:
    """One port of a device; None if the device has no such port."""
    folder = root / DEVICES / device / "ports" / str(port)
    if not folder.is_dir():
        return None
    return RdmaPort(device, port, _line(folder / "state"), _line(folder / "link_layer"), _gids(folder))


def _gids(folder: Path) -> tuple[Gid, ...]:
    try:
        indices = sorted(int(entry.name) for entry in (folder / "gids").iterdir() if entry.name.isdecimal())
    except OSError:
        return ()
    return tuple(
        Gid(index, _line(folder / "gids" / str(index)), _line(folder / "gid_attrs/types" / str(index)))
        for index in indices
    )


def _line(path: Path) -> str:
    """The file's text; an empty entry of the GID table cannot be read at all (EINVAL), which counts as empty."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def chosen_gid(port: RdmaPort, index: int) -> Gid | None:
    """The GID that the engine takes: MC_GID_INDEX if above 0, else the first RoCE v2 one with IPv4 (or type IB).

    None if there is no such entry; the engine then takes index 0, whatever that is.
    """
    if index > 0:
        return next((gid for gid in port.gids if gid.index == index), None)
    for gid in port.gids:
        if not gid.is_null and (gid.kind == ROCE_V2 and gid.ipv4 is not None or port.link_layer == "InfiniBand"):
            return gid
    return None
