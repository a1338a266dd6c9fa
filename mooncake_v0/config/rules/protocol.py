"""Rules about protocol and device_name.

What engine 0.3.3.post2 makes of a wrong one, measured: a protocol in capitals fails; rdma without a device, or with
one that does not exist, *succeeds*, logs one line, and every later transfer fails.
"""

from __future__ import annotations

import re
from typing import Iterator

from mooncake_v0.config.addresses import same_host
from mooncake_v0.config.rules.registry import Edit, Finding, Subject, rule
from mooncake_v0.config.source import quote, shorten
from mooncake_v0.errors import ERROR, WARNING

PROTOCOL = ("protocol",)
DEVICES = ("device_name",)
# names that Linux gives to network interfaces; RDMA devices are called mlx5_0, erdma_0, bnxt_re0, rocep1s0f0, ibp3s0, ...
INTERFACE = re.compile(
    r"lo|(eth|em|bond|team|br|docker|veth|vlan|wlan|tun|tap|virbr|xgbe|ib)[0-9]+(\.[0-9]+)?"
    r"|br-.+|en(o|s|p|x|P)[0-9a-f].*|ibs[0-9]+.*",
    re.ASCII,
)
DEVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
SIMILAR = {
    "roce": "rdma",
    "rocev2": "rdma",
    "ib": "rdma",
    "infiniband": "rdma",
    "verbs": "rdma",
    "erdma": "rdma",
    "efa": "rdma",
    "ethernet": "tcp",
    "socket": "tcp",
    "sockets": "tcp",
    "ip": "tcp",
}


def parts(subject: Subject) -> list[str]:
    """The devices as written, in order; no part for an absent or blank field."""
    text = subject.text("device_name") or ""
    return text.split(",") if text.strip() else []


@rule(ERROR, syntax=True)
def protocol_unknown(subject: Subject) -> Iterator[Finding]:
    """protocol is neither rdma nor tcp, the two that the V0 connector and the pinned engine have."""
    text = subject.text("protocol")
    if text is not None and text.strip().lower() not in ("tcp", "rdma"):
        import difflib

        word = text.strip().lower()
        near = SIMILAR.get(word) or next(iter(difflib.get_close_matches(word, ("tcp", "rdma"), n=1)), None)
        fix = f"write {quote(near)}" if near else 'write "rdma" (with device_name) or "tcp"'
        yield Finding(PROTOCOL, f"unknown protocol {shorten(text)!r}", fix)


@rule(WARNING, syntax=True)
def protocol_case(subject: Subject) -> Iterator[Finding]:
    """protocol has capitals or blanks. It is read as meant here; the engine's adaptor refuses "TCP" with -1."""
    text = subject.text("protocol")
    if text is not None and text not in ("tcp", "rdma") and text.strip().lower() in ("tcp", "rdma"):
        plain = text.strip().lower()
        yield Finding(
            PROTOCOL, f"protocol {text!r} is not in lower case", f"write {quote(plain)}", Edit(PROTOCOL, plain)
        )


@rule(ERROR, syntax=True)
def device_name_missing(subject: Subject) -> Iterator[Finding]:
    """protocol is rdma and device_name is empty or absent.

    The engine starts without a device and reports success; then every transfer fails.
    """
    if (
        subject.protocol == "rdma"
        and "device_name" not in subject.fields
        or subject.text("device_name") is not None
        and (subject.protocol == "rdma" and not parts(subject))
    ):
        fix = 'write its devices, for example "mlx5_0,mlx5_1" (see `ls /sys/class/infiniband`), or "protocol": "tcp"'
        yield Finding(DEVICES, "protocol rdma needs a device_name", fix, related=(PROTOCOL,))


@rule(WARNING, syntax=True)
def device_name_spaces(subject: Subject) -> Iterator[Finding]:
    """Blanks in the list of devices. They are ignored here; the engine takes them for a part of the device's name."""
    text = subject.text("device_name") or ""
    devices = parts(subject)
    if text and text != ",".join(part.strip() for part in devices):
        plain = ",".join(part.strip() for part in devices)
        yield Finding(
            DEVICES, f"blanks in device_name {shorten(text)!r}", f"write {quote(shorten(plain))}", Edit(DEVICES, plain)
        )


@rule(ERROR, syntax=True)
def device_name_empty_item(subject: Subject) -> Iterator[Finding]:
    """An empty place in the list of devices: a comma too many."""
    devices = [part.strip() for part in parts(subject)]
    if devices and "" in devices:
        plain = ",".join(part for part in devices if part)
        fix = f"write {quote(shorten(plain))}" if plain else "write the devices that `ls /sys/class/infiniband` lists"
        yield Finding(DEVICES, f"an empty place in device_name {shorten(subject.text('device_name') or '')!r}", fix)


@rule(ERROR, syntax=True)
def device_name_separator(subject: Subject) -> Iterator[Finding]:
    """The devices are separated by something else than a comma: blanks, semicolons, |, +."""
    for part in parts(subject):
        pieces = [piece for piece in re.split(r"[\s;|+:]+", part.strip()) if piece]
        if len(pieces) > 1 and all(DEVICE.fullmatch(piece) and not piece.isdigit() for piece in pieces):
            plain = ",".join(pieces)
            yield Finding(
                DEVICES, f"devices are not separated by commas: {shorten(part)!r}", f"write {quote(shorten(plain))}"
            )
            return


@rule(ERROR, syntax=True)
def device_name_syntax(subject: Subject) -> Iterator[Finding]:
    """Something that cannot be the name of an RDMA device: a path, a device with a port (mlx5_0:1), quotes, brackets.

    The names are those in /sys/class/infiniband. The port of a device is chosen with MC_IB_PORT. A quote would break
    the topology text that the engine builds from the names.
    """
    for part in parts(subject):
        name = part.strip()
        if name and not DEVICE.fullmatch(name):
            inner = re.fullmatch(r"[^A-Za-z0-9]*([A-Za-z0-9_.-]+?)(:[0-9]+)?[^A-Za-z0-9]*", name.rpartition("/")[2])
            is_device = inner is not None and not re.match(r"uverbs|umad|rdma_cm|issm", inner[1])
            fix = f"write {quote(inner[1])}" if inner and is_device else "write names from `ls /sys/class/infiniband`"
            yield Finding(DEVICES, f"{shorten(name)!r} is not a device name", fix)
            return


@rule(ERROR, syntax=True)
def device_name_interface(subject: Subject) -> Iterator[Finding]:
    """device_name names a network interface (eth0, ens3f0, bond0, ib0), not an RDMA device.

    RDMA devices have names of their own: mlx5_0, erdma_0, bnxt_re0, rocep65s0f0. `rdma link` shows which device
    belongs to which interface, `ls /sys/class/infiniband` lists them. Without one, use protocol tcp.
    """
    for name in subject.device_names:
        if INTERFACE.fullmatch(name) and subject.protocol == "rdma":
            fix = 'write the RDMA device that `rdma link` shows for it, or use protocol "tcp"'
            yield Finding(DEVICES, f"{name!r} is a network interface, not an RDMA device", fix, related=(PROTOCOL,))
            return


@rule(ERROR, syntax=True)
def device_name_duplicate(subject: Subject) -> Iterator[Finding]:
    """One device is listed twice. It does not get faster by that; mostly a digit was not changed in a copy."""
    seen: set[str] = set()
    for name in subject.device_names:
        if name in seen:
            plain = ",".join(dict.fromkeys(subject.device_names))
            yield Finding(
                DEVICES, f"{name!r} is listed twice", f"write {quote(shorten(plain))}, or the device that was meant"
            )
            return
        seen.add(name)


@rule(WARNING)
def device_name_unused(subject: Subject) -> Iterator[Finding]:
    """protocol is tcp, so device_name has no effect. If RDMA was meant, protocol is wrong."""
    if subject.protocol == "tcp" and subject.device_names:
        what = f"device_name {shorten(','.join(subject.device_names))!r} has no effect with protocol tcp"
        yield Finding(DEVICES, what, 'write "device_name": "", or "protocol": "rdma"', related=(PROTOCOL,))


@rule(WARNING)
def rdma_loopback(subject: Subject) -> Iterator[Finding]:
    """RDMA with several devices between two instances on one machine.

    Each 64 KiB slice takes a random device on either side (rdma_transport.cpp of 0.3.3.post2), so every device must
    reach every other through the switch; on one machine that often fails with "transport retry counter exceeded".
    """
    prefill, decode = subject.written["prefill"], subject.written["decode"]
    if subject.protocol != "rdma" or len(subject.device_names) < 2 or prefill is None or decode is None:
        return
    if same_host(prefill.host, decode.host):
        what = f"{len(subject.device_names)} RDMA devices between two instances on one machine"
        related = (PROTOCOL, ("prefill_url",), ("decode_url",))
        yield Finding(DEVICES, what, 'keep one device, or use "protocol": "tcp" on one machine', related=related)
