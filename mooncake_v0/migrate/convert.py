"""One V0 instance into the V1 command that takes its place, with every change and its reason. Called by `report`.

What happens to a flag is decided by the `action` of its row in flags.csv (and envs.csv, kv_config.csv); the functions in
`converters` carry out the actions that need more than keeping, dropping or renaming.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import Any, Sequence

from mooncake_v0.migrate.converters import CONVERTERS, Conversion
from mooncake_v0.migrate.facts import Fact, applies, by_name, find, has
from mooncake_v0.migrate.instances import Instance
from mooncake_v0.migrate.json_values import compact
from mooncake_v0.migrate.server_arguments import KV_FLAG, Flag

_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]+")
_PLACEHOLDER = re.compile(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}")
CONNECTOR, STORE = "MooncakeConnector", "MooncakeStoreConnector"
ROLE_NAMES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}


@dataclass(frozen=True)
class Change:
    """One thing that differs between the V0 and the V1 command; after is "" for what goes, before for what comes."""

    what: str
    before: str
    after: str
    severity: str
    why: str
    source: str


@dataclass(frozen=True)
class V1Instance:
    """What runs instead of an instance; not_carried are flags that no known release has."""

    name: str
    role: str
    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...]
    changes: tuple[Change, ...]
    not_carried: tuple[str, ...]
    bootstrap_port: int | None
    original: Instance = field(repr=False)

    def command(self) -> str:
        """One line for a shell; nothing in it is expanded but `${NAME}` that stood alone in the original."""
        return " ".join([*(f"{name}={quote(value)}" for name, value in self.env), *map(quote, self.argv)])

    def kv_transfer_config(self) -> str:
        return self.argv[self.argv.index(KV_FLAG) + 1] if KV_FLAG in self.argv else ""


def quote(word: str) -> str:
    """Shell quoting; a value known only when the script runs, `${NAME}` alone, stays an expansion in double quotes."""
    return f'"{word}"' if _PLACEHOLDER.fullmatch(word) else shlex.quote(word)


def convert(instance: Instance, target: str, bootstrap_port: int | None) -> V1Instance:
    """The V1 instance; bootstrap_port is given for instances that prefill."""
    conversion = Conversion(target)
    _entrypoint(instance, conversion)
    not_carried: list[str] = []
    for flag in instance.arguments.flags:
        if not flag.known:
            not_carried.append(" ".join([flag.name, *flag.values]))
        elif flag.name == KV_FLAG and instance.role in ROLE_NAMES:
            conversion.flags.append(Flag(KV_FLAG, (compact(_kv_config(instance, conversion)),)))
        else:
            _flag(flag, conversion)
    conversion.finish()
    _variables(instance, conversion, bootstrap_port)
    argv = ["vllm", "serve", *([instance.model] if instance.model else [])]
    for flag in conversion.flags:
        argv += [flag.name, *flag.values]
    return V1Instance(
        name=instance.name,
        role=instance.role,
        argv=tuple(argv),
        env=tuple(conversion.env.items()),
        changes=tuple(Change(*change) for change in conversion.changes),
        not_carried=tuple(not_carried),
        bootstrap_port=bootstrap_port,
        original=instance,
    )


def _entrypoint(instance: Instance, conversion: Conversion) -> None:
    if instance.arguments.entrypoint == "module":
        row = find("python -m vllm.entrypoints.openai.api_server", "flags")[0]
        conversion.change(row, row.name, "vllm serve", why="deprecated entry point; the model is the first argument")


def _flag(flag: Flag, conversion: Conversion) -> None:
    row = by_name("flags").get(flag.name)
    if row is None:
        conversion.flags.append(flag)
        option = by_name("options").get(flag.name.partition(".")[0])
        if option is not None:
            conversion.remark(
                flag.name, " ".join(flag.values), "0.6.4.post1 does not have it; kept, because V1 does", option
            )
        return
    if not applies(row, conversion.target) or (row.action == "keep" and row.status in ("same", "default_changed")):
        conversion.flags.append(flag)
    elif row.action == "keep":
        conversion.flags.append(flag)
        conversion.change(row, _written(flag), _written(flag))
    elif row.action == "drop":
        conversion.change(row, _written(flag), "")
    elif row.action == "rename":
        conversion.flags.append(Flag(row.replacement, flag.values))
        conversion.change(row, _written(flag), _written(Flag(row.replacement, flag.values)))
    elif row.action == "replace":
        name, _, value = row.replacement.partition(" ")
        conversion.flags.append(Flag(name, (value,) if value else ()))
        conversion.change(row, _written(flag), row.replacement)
    else:
        CONVERTERS[row.action](flag, row, conversion)


def _written(flag: Flag) -> str:
    return " ".join([flag.name, *flag.values])


def _kv_config(instance: Instance, conversion: Conversion) -> dict[str, Any]:
    """The new object: rejected keys go, protocol and device come from mooncake.json, defaults that flipped are written."""
    old = dict(instance.kv or {})
    store = instance.connector == STORE
    new: dict[str, Any] = {"kv_connector": STORE if store else CONNECTOR, "kv_role": ROLE_NAMES[instance.role]}
    if instance.connector not in (CONNECTOR, STORE):
        row = find("kv_connector", "kv_config")[0]
        why = f"{instance.connector or 'no connector'} is not Mooncake; check that Mooncake is what you want"
        conversion.changes.append(
            (row.name, f"kv_connector: {instance.connector}", f"kv_connector: {CONNECTOR}", "change", why, row.source)
        )
    for key, value in old.items():
        if key in ("kv_connector", "kv_role", "kv_connector_extra_config"):
            continue
        rows = find(key, "kv_config")
        if rows and rows[0].action == "keep":
            new[key] = value
        elif rows:
            conversion.change(rows[0], f"{key}: {compact(value)}", "")
        else:
            conversion.changes.append(
                (
                    f"{KV_FLAG} {key}",
                    f"{key}: {compact(value)}",
                    "",
                    "change",
                    "no key of vLLM; V1 refuses unknown keys",
                    "",
                )
            )
    if has("load_failure_policy_fail", conversion.target) and "kv_load_failure_policy" not in old:
        new["kv_load_failure_policy"] = "recompute"
        conversion.change(find("kv_load_failure_policy", "kv_config")[0], "", "kv_load_failure_policy: recompute")
    extra = (
        dict((instance.kv or {}).get("kv_connector_extra_config") or {})
        if store
        else _extra_config(instance, conversion)
    )
    if extra:
        new["kv_connector_extra_config"] = extra
    return new


def _extra_config(instance: Instance, conversion: Conversion) -> dict[str, Any]:
    old = (instance.kv or {}).get("kv_connector_extra_config")
    extra: dict[str, Any] = dict(old) if isinstance(old, dict) else {}
    config = instance.config
    if has("mooncake_protocol", conversion.target) and "mooncake_protocol" not in extra:
        extra["mooncake_protocol"] = config.protocol if config else "rdma"
        row = by_name("capabilities")["mooncake_protocol"]
        before = f"mooncake.json protocol: {config.protocol}" if config else "mooncake.json (not given)"
        conversion.change(
            row, before, f"mooncake_protocol: {extra['mooncake_protocol']}", why="V0 defaulted to tcp, V1 to rdma"
        )
    device = config.text("device_name") if config else ""
    wanted = device and "device_name" not in extra and extra.get("mooncake_protocol") != "tcp"
    if wanted and has("device_name", conversion.target):
        extra["device_name"] = device
        row = by_name("capabilities")["device_name"]
        conversion.change(row, f"mooncake.json device_name: {device}", f"device_name: {device}", why=row.text)
    return extra


def _variables(instance: Instance, conversion: Conversion, bootstrap_port: int | None) -> None:
    carried: dict[str, str] = {}
    for name, value in instance.env:
        row = by_name("envs").get(name)
        if row is not None and applies(row, conversion.target) and row.action in CONVERTERS:
            CONVERTERS[row.action](Flag(name, (value,)), row, conversion)
        elif name == "MOONCAKE_CONFIG_PATH" and instance.connector == STORE:
            carried[name] = value
        elif row is not None and applies(row, conversion.target) and row.action == "drop":
            conversion.change(row, f"{name}={value}", "")
        elif name not in ("VLLM_HOST_IP", "VLLM_MOONCAKE_BOOTSTRAP_PORT"):
            carried[name] = value
            if row is not None and row.status == "semantics_changed" and applies(row, conversion.target):
                conversion.change(row, f"{name}={value}", f"{name}={value}")
    first = _new_variables(instance, conversion, bootstrap_port)
    conversion.env = {**first, **carried, **conversion.env}


def _new_variables(instance: Instance, conversion: Conversion, bootstrap_port: int | None) -> dict[str, str]:
    first: dict[str, str] = {}
    given = instance.variable("VLLM_HOST_IP") or conversion.env.pop("VLLM_HOST_IP", "")
    address = given or (instance.host if _ADDRESS.fullmatch(instance.host) else "")
    if instance.role in ROLE_NAMES and address:
        first["VLLM_HOST_IP"] = address
        if not given:
            conversion.change(by_name("envs")["VLLM_HOST_IP"], "", f"VLLM_HOST_IP={address}", why=_HOST_IP)
    elif given:
        first["VLLM_HOST_IP"] = given
    if bootstrap_port is not None:
        row = by_name("envs")["VLLM_MOONCAKE_BOOTSTRAP_PORT"]
        first["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = str(bootstrap_port)
        if instance.variable("VLLM_MOONCAKE_BOOTSTRAP_PORT") != str(bootstrap_port):
            conversion.change(row, "", f"VLLM_MOONCAKE_BOOTSTRAP_PORT={bootstrap_port}")
    return first


_HOST_IP = "the address that engine, ZeroMQ socket and workers use; V0 took it from mooncake.json"


def unresolved(instances: Sequence[V1Instance]) -> list[str]:
    """Names and commands that only a running shell knows, in order of first use."""
    words = [word for item in instances for word in item.argv]
    words += [value for item in instances for name, value in item.env if value != f"${{{name}}}"]
    found = [match for word in words for match in re.findall(r"\$\{[A-Za-z_][A-Za-z0-9_]*\}|\$\([^)]*\)|`[^`]+`", word)]
    return list(dict.fromkeys(found))


def row_of(change: Change) -> Fact | None:
    """The row behind a change, for `explain`."""
    rows = find(change.what)
    return rows[0] if rows else None
