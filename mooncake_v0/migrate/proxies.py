"""The proxies of today: scripts that are given or started, ours, and NIXL's toy proxy. Called by `deployment`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Mapping, Sequence

from mooncake_v0.migrate.python_scripts import ProxyScript, parse_proxy
from mooncake_v0.migrate.records import Found, Invocation, Place, Shape

_PREFILL = ("--prefill", "--prefill-url", "--prefiller-host", "--prefiller-hosts")
_DECODE = ("--decode", "--decode-url", "--decoder-host", "--decoder-hosts")


@dataclass(frozen=True)
class Proxy:
    """kind: documented, vllm-v0 (its examples and benchmarks), toy, v1, mooncake-v0 or unknown.

    upstreams: addresses as written; port is "" if nothing says it
    """

    kind: str
    upstreams: tuple[str, ...]
    host: str
    port: str
    place: Place
    env: tuple[tuple[str, str], ...] = ()
    shape: Shape = Shape("shell")


def find_proxies(found: Found) -> list[Proxy]:
    """Proxies that are started, then proxy scripts that nothing given starts."""
    scripts = {file.path: script for file in found.files if (script := _script(file.path, file.text, file.place))}
    proxies: list[Proxy] = []
    started: set[str] = set()
    for invocation in found.invocations:
        if invocation.argv[0].rpartition("/")[2] == "mooncake-v0" and invocation.argv[1:2] == ("proxy",):
            proxies.append(_from_arguments("mooncake-v0", invocation, None))
            continue
        path = next((word for word in invocation.argv[:4] if word.endswith(".py")), "")
        if not path or (invocation.argv[0].rpartition("/")[2] == "vllm"):
            continue
        match = _script_named(path, scripts)
        if match is not None:
            started.add(match)
            proxies.append(_from_arguments(scripts[match].kind, invocation, scripts[match]))
        elif "toy_proxy" in path or any(word.startswith("--prefiller-") for word in invocation.argv):
            proxies.append(_from_arguments("toy", invocation, None))
        elif "proxy" in path or "mooncake" in path:
            kind = "v1" if "mooncake_connector_proxy" in path else "vllm-v0" if "disagg" in path else "unknown"
            proxies.append(_from_arguments(kind, invocation, None))
    for path, script in scripts.items():
        if path not in started:
            proxies.append(Proxy(script.kind, script.upstreams, "0.0.0.0", script.port, script.place))
    return list({(proxy.kind, proxy.upstreams, proxy.port): proxy for proxy in reversed(proxies)}.values())[::-1]


def _script_named(path: str, scripts: Mapping[str, ProxyScript]) -> str | None:
    """The key of a script by its file name; a script in a runbook has no name, but may be the only one."""
    name = path.rpartition("/")[2]
    named = [key for key in scripts if key.rpartition("/")[2] == name]
    unnamed = [key for key in scripts if "#" in key]
    return named[0] if named else unnamed[0] if len(unnamed) == 1 and "proxy" in name else None


def _script(path: str, text: str, place: Place) -> ProxyScript | None:
    looks = path.endswith((".py", ".python")) or (path.startswith("configmap:") and "import" in text)
    return parse_proxy(text, place) if looks and ("completions" in text or "prefill" in text) else None


def _from_arguments(kind: str, invocation: Invocation, script: ProxyScript | None) -> Proxy:
    addresses = _values(invocation.argv, _PREFILL, "--prefiller-port") + _values(
        invocation.argv, _DECODE, "--decoder-port"
    )
    return Proxy(
        kind=kind,
        upstreams=tuple(addresses) or (script.upstreams if script else ()),
        host=_value(invocation.argv, "--host") or "",
        port=_value(invocation.argv, "--port") or (script.port if script else ""),
        place=invocation.place,
        env=invocation.env,
        shape=invocation.shape,
    )


def _value(argv: Sequence[str], name: str) -> str:
    for index, word in enumerate(argv):
        if word == name and index + 1 < len(argv):
            return argv[index + 1]
        if word.startswith(name + "="):
            return word.partition("=")[2]
    return ""


def _values(argv: Sequence[str], names: Sequence[str], port_name: str) -> list[str]:
    values = [value for name in names if (value := _value(argv, name))]
    port = _value(argv, port_name)
    return [f"http://{value}:{port}" if port and not re.match(r"https?://", value) else value for value in values]
