"""Checks of environment variables: those of the engine, of vLLM, of torch and our own. The variables are this shell's; a
service may have others (`systemctl show -p Environment`)."""

from __future__ import annotations

from pathlib import Path
from typing import Iterator

from mooncake_v0.config.addresses import parse_metadata
from mooncake_v0.config.launch import Launch
from mooncake_v0.config.launch_rules import (
    PROXY_RULES,
    Proxied,
    launch_engine_v1,
    launch_engine_variable,
    launch_old_variable,
)
from mooncake_v0.config.rules.registry import Finding
from mooncake_v0.doctor.host import Host
from mooncake_v0.doctor.report import ERROR, INFO, OK, SKIPPED, WARNING, Outcome, check

RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")


@check(ERROR)
def engine_variables(host: Host) -> Iterator[Outcome]:
    """An MC_ variable has a value that ends the process when the engine is imported, or breaks every transfer."""
    yield from _all(launch_engine_variable(_launch(host)), ERROR, host, "no MC_ variable has a deadly value")


@check(WARNING)
def old_variables(host: Host) -> Iterator[Outcome]:
    """Variables of the integration before mooncake.json (v0.1). They are not read any more; now the file counts.

    MASTER_ADDR and MASTER_PORT are among them: torchrun sets them for its own use, the old guide for the pair's.
    """
    found = list(launch_old_variable(_launch(host)))
    for name in RENDEZVOUS:
        if name in host.environment:
            fix = "remove it; the addresses are in the mooncake.json"
            found.append(Finding((name,), f"{name} has no effect on a pair", fix))
    yield from _all(iter(found), WARNING, host, "no variable of the old integration is set")


@check(ERROR)
def vllm_engine_variable(host: Host) -> Iterator[Outcome]:
    """VLLM_USE_V1=1 selects the unfinished V1 engine of vLLM 0.6.4.post1, which has no transfer."""
    yield from _all(launch_engine_v1(_launch(host)), ERROR, host, "vLLM's V0 engine is selected")


def _launch(host: Host) -> Launch:
    return Launch((), host.environment, "environment")


def _all(findings: Iterator[Finding], status: str, host: Host, fine: str) -> Iterator[Outcome]:
    found = False
    for item in findings:
        found = True
        name = str(item.path[0]) if item.path else ""
        yield Outcome(status, item.what, _assignment(host, name), item.fix, _command(name, item.fix))
    if not found:
        yield Outcome(OK, fine)


def _assignment(host: Host, name: str) -> str:
    return f"{name}={host.environment[name]}" if name in host.environment else ""


def _command(name: str, fix: str) -> str:
    """The variable's own fix where it is an assignment, else unset it."""
    if fix.startswith("set ") and "=" in fix:
        return f"export {fix[4:]}"
    return f"unset {name}" if name.isupper() or name.islower() else ""


@check(ERROR)
def proxy_variables(host: Host) -> Iterator[Outcome]:
    """http_proxy is set and no_proxy does not exempt the metadata server: the engine asks the proxy for it and fails.

    Works in curl with your shell, not in vLLM: often only the service has the variable. The transfer agents exempt the
    metadata server by themselves; other clients of it (curl, a stock engine) do not.
    """
    address = parse_metadata(host.config.metadata_server) if host.config is not None else None
    if address is None:
        yield Outcome(SKIPPED, "no mooncake.json, so no metadata server is known")
        return
    found = [finding for _, finding in PROXY_RULES.run(Proxied(host.environment, address))]
    yield from _all(iter(found), ERROR, host, "no proxy stands between this host and the metadata server")


@check(ERROR)
def plugin_variables(host: Host) -> Iterator[Outcome]:
    """TORCH_DEVICE_BACKEND_AUTOLOAD=0 or a VLLM_PLUGINS list without mooncake_v0 keeps this package out of vLLM.

    Then --kv-transfer-config is an unrecognized argument, or the workers transfer nothing.
    """
    autoload = host.environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD")
    plugins = host.environment.get("VLLM_PLUGINS")
    fine = True
    if autoload == "0":
        fine = False
        what = "TORCH_DEVICE_BACKEND_AUTOLOAD=0: vLLM's command line does not know --kv-transfer-config"
        yield Outcome(ERROR, what, "", "remove it", "unset TORCH_DEVICE_BACKEND_AUTOLOAD")
    if plugins is not None and "mooncake_v0" not in [name.strip() for name in plugins.split(",")]:
        fine = False
        what = "VLLM_PLUGINS does not name mooncake_v0: vLLM's processes do not load it"
        listed = ",".join(filter(None, (plugins, "mooncake_v0")))
        yield Outcome(
            ERROR, what, f"VLLM_PLUGINS={plugins}", "remove it, or add mooncake_v0", f"export VLLM_PLUGINS={listed}"
        )
    if fine:
        yield Outcome(OK, "vLLM may load the plugin")


@check(ERROR)
def own_variables(host: Host) -> Iterator[Outcome]:
    """MOONCAKE_CONFIG_PATH, MOONCAKE_V0_SECRET_FILE, MOONCAKE_V0_WAIT_S and MOONCAKE_V0_TTL_S: readable files, numbers.

    The secret's file must be readable for vLLM's user and for nobody else.
    """
    problems = [*_path_problems(host), *_number_problems(host)]
    yield from problems or [Outcome(OK, "the variables of this package are right, or not set")]


def _path_problems(host: Host) -> Iterator[Outcome]:
    for name in ("MOONCAKE_CONFIG_PATH", "MOONCAKE_V0_SECRET_FILE"):
        value = host.environment.get(name)
        if value is None:
            continue
        try:
            content = Path(value).read_bytes()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            yield Outcome(
                ERROR, f"{name} names a file that cannot be read: {reason}", f"{name}={value}", "correct the path"
            )
            continue
        if name == "MOONCAKE_V0_SECRET_FILE":
            yield from _secret_problems(Path(value), content)


def _secret_problems(path: Path, content: bytes) -> Iterator[Outcome]:
    if len(content.strip()) < 16:
        what = f"the shared secret has {len(content.strip())} bytes; a short one can be guessed"
        yield Outcome(
            WARNING, what, str(path), "make a longer one, the same on both hosts", f"openssl rand -hex 32 > {path}"
        )
    if path.stat().st_mode & 0o077:
        what = "the shared secret's file can be read by other users"
        yield Outcome(
            WARNING, what, f"mode {path.stat().st_mode & 0o777:o}", "take their rights away", f"chmod 600 {path}"
        )


def _number_problems(host: Host) -> Iterator[Outcome]:
    for name in ("MOONCAKE_V0_WAIT_S", "MOONCAKE_V0_TTL_S"):
        value = host.environment.get(name)
        if value is None:
            continue
        try:
            wrong = float(value) < 0
        except ValueError:
            wrong = True
        if wrong:
            what = f"{name} is not a number of seconds, so that its default is used"
            yield Outcome(WARNING, what, f"{name}={value}", "write a number such as 10", f"unset {name}")


@check(INFO)
def log_level(host: Host) -> Iterator[Outcome]:
    """VLLM_LOGGING_LEVEL=DEBUG makes vLLM and the transfer agents say what they do, request by request."""
    level = host.environment.get("VLLM_LOGGING_LEVEL", "INFO")
    if level == "DEBUG":
        yield Outcome(
            INFO,
            "VLLM_LOGGING_LEVEL is DEBUG: logs grow fast",
            "",
            "remove it when you are done",
            "unset VLLM_LOGGING_LEVEL",
        )
    else:
        fix = "for more detail restart the instance with DEBUG"
        yield Outcome(INFO, f"VLLM_LOGGING_LEVEL is {level}", "", fix, "export VLLM_LOGGING_LEVEL=DEBUG")
