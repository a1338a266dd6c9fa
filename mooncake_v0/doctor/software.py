"""Checks of what is installed: Python, the system's C library, CPU, packages, shared libraries, the engine itself."""

from __future__ import annotations

import os
import platform
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Iterator, Mapping

from mooncake_v0 import ENGINE_VERSIONS, VLLM_VERSION, __version__
from mooncake_v0.config.launch import Launch
from mooncake_v0.config.launch_rules import launch_engine_variable
from mooncake_v0.doctor.host import Host
from mooncake_v0.doctor.report import ERROR, INFO, OK, SKIPPED, WARNING, Outcome, check

ENGINE = "mooncake-transfer-engine"
TESTED_VERSIONS = Path(__file__).with_name("tested_versions.txt")
# soname -> (Debian and Ubuntu package, RHEL package); what the engine's wheel needs and does not bring
LIBRARIES: Mapping[str, tuple[str, str]] = {
    "libcurl.so.4": ("libcurl4", "libcurl"),
    "libibverbs.so.1": ("libibverbs1", "libibverbs"),
    "libmlx5.so.1": ("ibverbs-providers", "libibverbs"),
    "libnuma.so.1": ("libnuma1", "numactl-libs"),
    "librdmacm.so.1": ("librdmacm1", "librdmacm"),
    "libstdc++.so.6": ("libstdc++6", "libstdc++"),
    "libgcc_s.so.1": ("libgcc-s1", "libgcc"),
}
ENGINE_NEEDS_GLIBC = (2, 35)  # wheels of 0.3.3.post2 are tagged manylinux_2_35
ENGINE_MODULES = ("engine.so",)
REASONS: Mapping[str, str] = {
    "0.3.3": "it is linked against AddressSanitizer and aborts at import",
    "0.3.1": "it has no etcd support",
    "0.3.2": "it has no etcd support",
    "0.3.2.post1": "it has no etcd support",
}


@check(ERROR)
def python_version(host: Host) -> Iterator[Outcome]:
    """Python must be 3.9 to 3.12: vLLM 0.6.4.post1 knows no later one. On aarch64 the engine has wheels for 3.10 only."""
    found = platform.python_version()
    machine = platform.machine()
    if not (3, 9) <= sys.version_info[:2] <= (3, 12):
        fix = "make the virtual environment with Python 3.11 or 3.12"
        yield Outcome(
            ERROR, f"Python {found} cannot run vLLM {VLLM_VERSION}", sys.executable, fix, "python3.11 -m venv .venv"
        )
    elif machine == "aarch64" and sys.version_info[:2] != (3, 10):
        yield Outcome(
            ERROR, f"the engine has no aarch64 wheel for Python {found}", machine, "use Python 3.10 on aarch64"
        )
    else:
        yield Outcome(OK, f"Python {found} on {machine}", sys.executable)


@check(ERROR)
def c_library(host: Host) -> Iterator[Outcome]:
    """The engine's wheels need glibc 2.35 or later (Debian 12, Ubuntu 22.04, RHEL 9 has 2.34 and is too old)."""
    text = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else None
    if not text:
        yield Outcome(ERROR, "the C library is not glibc", platform.platform(), "use Debian 12, Ubuntu 22.04 or later")
        return
    version = tuple(int(part) for part in text.split()[-1].split(".")[:2])
    if version < ENGINE_NEEDS_GLIBC:
        yield Outcome(
            ERROR, f"{text} is older than 2.35", text, "use Debian 12, Ubuntu 22.04 or later, or a container of one"
        )
    else:
        yield Outcome(OK, text)


@check(ERROR)
def cpu_flags(host: Host) -> Iterator[Outcome]:
    """The CPU build of vLLM (version 0.6.4.post1+cpu) needs AVX2; without it every process dies with SIGILL."""
    version = host.version("vllm") or ""
    if not version.endswith("+cpu"):
        yield Outcome(SKIPPED, "only the CPU build of vLLM needs certain CPU flags")
        return
    lines = (host.proc / "cpuinfo").read_text(errors="replace").splitlines()
    flags = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    if "avx2" in flags:
        yield Outcome(OK, "the CPU has AVX2")
    else:
        yield Outcome(
            ERROR, "the CPU has no AVX2, which vLLM's CPU build uses", " ".join(flags)[:200], "use another machine"
        )


@check(ERROR)
def pinned_versions(host: Host) -> Iterator[Outcome]:
    """vLLM and the transfer engine must be the pinned versions.

    Others are refused at start: the wire format, the Python binding and vLLM's internals differ from version to version.
    """
    for package, wanted in (("vllm", (VLLM_VERSION,)), (ENGINE, ENGINE_VERSIONS)):
        found = host.version(package)
        command = f"pip install -c {TESTED_VERSIONS} '{package}=={wanted[-1]}'"
        if found is None:
            what = f"{package} is not installed in this environment"
            yield Outcome(
                INFO, what, host.python, "nothing, if this host serves no model; else install the pin", command
            )
        elif found.partition("+")[0] not in wanted:
            why = REASONS.get(found, "it is not one of the tested versions")
            yield Outcome(
                ERROR, f"{package} is {found}: {why}", f"wanted {' or '.join(wanted)}", "install the pin", command
            )
        else:
            yield Outcome(OK, f"{package} {found}")


def install_command() -> str:
    """What installs vLLM and the engine beside this package, wherever it was installed from."""
    return f"pip install -c {TESTED_VERSIONS} vllm=={VLLM_VERSION} {ENGINE}=={ENGINE_VERSIONS[-1]}"


def tested_versions() -> dict[str, str]:
    """Package -> version, of the set in which the pin was tested; the file is configs/constraints-vllm-….txt."""
    lines = [line.split("#")[0].strip() for line in TESTED_VERSIONS.read_text().splitlines()]
    return dict(line.split("==", 1) for line in lines if "==" in line)


@check(WARNING)
def version_drift(host: Host) -> Iterator[Outcome]:
    """A package has another version than in the tested set.

    vLLM 0.6.4.post1 leaves most of its requirements open, and pip takes what is newest: transformers 5, with which it
    does not start, or a fastapi with which every route answers 500.
    """
    if host.version("vllm") is None:
        yield Outcome(SKIPPED, "vLLM is not installed here")
        return
    drifted = []
    for package, wanted in tested_versions().items():
        found = host.version(package)
        if found is not None and found.partition("+")[0] != wanted:
            drifted.append((package, found, wanted))
    if not drifted:
        yield Outcome(OK, "every installed package has its tested version")
        return
    names = ", ".join(f"{name} {found}" for name, found, _ in drifted[:5])
    more = f" and {len(drifted) - 5} more" if len(drifted) > 5 else ""
    evidence = "\n".join(f"{name} {found}, tested with {wanted}" for name, found, wanted in drifted)
    command = "pip install " + " ".join(f"'{name}=={wanted}'" for name, _, wanted in drifted)
    yield Outcome(WARNING, f"not the tested versions: {names}{more}", evidence, "install the tested ones", command)


@check(ERROR)
def shared_libraries(host: Host) -> Iterator[Outcome]:
    """A shared library that the engine needs is missing on this system, or cannot be loaded.

    The wheel brings some, but not libcurl, libibverbs and libnuma, which even tcp needs. Slim images have none of them.
    """
    files = _engine_files(host)
    if not files:
        yield Outcome(SKIPPED, "the engine is not installed here")
        return
    missing: dict[str, str] = {}
    for file in files:
        missing.update(_missing_libraries(host, file))
    for name, line in missing.items():
        debian, rhel = LIBRARIES.get(name, ("", ""))
        fix = f"install it: {debian} (Debian, Ubuntu) or {rhel} (RHEL)" if debian else "install the package that has it"
        command = f"apt-get install {debian}  # RHEL: dnf install {rhel}" if debian else f"apt-file search {name}"
        yield Outcome(ERROR, f"the engine needs {name}, which cannot be loaded", line, fix, command)
    if not missing:
        yield Outcome(OK, "every shared library of the engine is there")


def _engine_files(host: Host) -> list[Path]:
    folder = host.module_folder("mooncake")
    return [folder / name for name in ENGINE_MODULES if (folder / name).is_file()] if folder is not None else []


def _missing_libraries(host: Host, file: Path) -> dict[str, str]:
    """soname -> the line of ldd that says so. The loader stops at the first unreadable file, but lists all absent ones."""
    found: dict[str, str] = {}
    for line in host.run(["ldd", str(file)], 30).output.splitlines():
        text = line.strip()
        if text.endswith("=> not found"):
            found[text.split()[0]] = text
        elif "error while loading shared libraries:" in text:
            # "…: error while loading shared libraries: PATH: file too short"
            path = text.split("error while loading shared libraries:")[1].split(":")[0].strip()
            found[Path(path).name] = text
    return found


@check(ERROR)
def engine_import(host: Host) -> Iterator[Outcome]:
    """The engine cannot be imported. It is tried in a child process, since it may abort or segfault.

    It reads its MC_ variables at import; a bad value ends the process there. Where another check has named the reason, this
    is a note.
    """
    if host.module_folder("mooncake") is None:
        yield Outcome(SKIPPED, "the engine is not installed here")
        return
    done = host.run([host.python, "-c", "import mooncake.engine"])
    if done.code == 0:
        yield Outcome(OK, "the engine can be imported")
        return
    how = f"signal {signal.Signals(-done.code).name}" if done.code < 0 else f"exit code {done.code}"
    lines = [line for line in done.output.strip().splitlines() if line.strip()]
    cause = _known_cause(host)
    if cause:
        yield Outcome(
            INFO, f"importing the engine ends with {how}", "\n".join(lines[-3:]), f"repair what {cause} names"
        )
        return
    fix = "see the other findings: a missing library, a version, an MC_ variable; else reinstall the engine"
    command = f"pip install --force-reinstall --no-deps {ENGINE}=={ENGINE_VERSIONS[-1]}"
    yield Outcome(ERROR, f"importing the engine ends with {how}", "\n".join(lines[-3:]), fix, command)


def _known_cause(host: Host) -> str:
    """The check that has named the reason why the engine cannot be imported, so that one trouble is one error; or ""."""
    if host.version(ENGINE) not in (None, *ENGINE_VERSIONS):
        return "pinned-versions"
    if any(_missing_libraries(host, file) for file in _engine_files(host)):
        return "shared-libraries"
    deadly = {str(finding.path[0]) for finding in launch_engine_variable(Launch((), host.environment, "environment"))}
    if not deadly:
        return ""
    without = {name: value for name, value in host.environment.items() if name not in deadly}
    again = replace(host, environment=without).run([host.python, "-c", "import mooncake.engine"])
    return "" if again.code else "engine-variables"


@check(ERROR)
def plugin_entry_points(host: Host) -> Iterator[Outcome]:
    """vLLM finds this package by two entry points; without them --kv-transfer-config is an unrecognized argument."""
    import importlib.metadata as metadata

    if host.version("vllm") is None:
        yield Outcome(SKIPPED, "vLLM is not installed here")
        return
    try:
        points = {(point.group, point.name) for point in metadata.distribution("mooncake-v0").entry_points}
    except metadata.PackageNotFoundError:
        points = set()
    wanted = {("torch.backends", "mooncake_v0"), ("vllm.general_plugins", "mooncake_v0")}
    if wanted <= points:
        yield Outcome(OK, "the plugin is registered with torch and vLLM")
    else:
        what = "mooncake-v0 is not installed in this environment, so vLLM does not know --kv-transfer-config"
        yield Outcome(
            ERROR, what, host.python, "install it beside vLLM, not only into the path", f"pip install {_own_source()}"
        )


def _own_source() -> str:
    """What pip can install this package from: the checkout that runs now, or else the wheel's file."""
    checkout = Path(__file__).parents[2]
    return str(checkout) if (checkout / "setup.cfg").is_file() else f"mooncake_v0-{__version__}-py3-none-any.whl"
