"""Readers of single formats: their odd corners, each with the line that a real file has."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import mooncake_v0.migrate
from mooncake_v0.migrate.compose import interpolate
from mooncake_v0.migrate.docker import parse_docker_run
from mooncake_v0.migrate.env_files import looks_like_env_file, parse_env_file
from mooncake_v0.migrate.instances import split_address
from mooncake_v0.migrate.json_values import parse_mooncake_json, parse_object
from mooncake_v0.migrate.records import Place
from mooncake_v0.migrate.report import Migration, build
from mooncake_v0.migrate.server_arguments import config_words, parse_server
from mooncake_v0.migrate.systemd import parse_unit


def instances(text: str) -> Migration:
    return build(["-"], "0.33.0", {}, text)


@pytest.mark.parametrize(
    ("text", "value", "repaired"),
    [
        ('{"a":1}', {"a": 1}, False),
        ("{'a':'b'}", {"a": "b"}, True),
        ("{“a”:“b”}", {"a": "b"}, True),
        ('{"a":1,}', {"a": 1}, True),
        ("'{\"a\":1}'", {"a": 1}, True),
        ('{\\"a\\":1}', {"a": 1}, True),
        ("{kv_role:kv_producer,kv_rank:0,x:2e9}", {"kv_role": "kv_producer", "kv_rank": 0, "x": 2e9}, True),
    ],
)
def test_mangled_json_is_read_and_the_repair_is_named(text: str, value: dict[str, object], repaired: bool) -> None:
    parsed = parse_object(text)
    assert parsed is not None
    assert (parsed.value, bool(parsed.repaired)) == (value, repaired)


@pytest.mark.parametrize("text", ["", "[1]", "nonsense", "{", "{{}", "3", "{a}"])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    assert parse_object(text) is None


def test_a_mooncake_json_with_comments_and_bom_is_read() -> None:
    parsed = parse_mooncake_json('\ufeff// ours\n{"prefill_url": "a:1", "decode_url": "b:2"}')
    assert parsed is not None and parsed.repaired == "comments in a JSON file"


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("10.0.0.1:13003", ("10.0.0.1", "13003")),
        ("[fd00::1]:13003", ("fd00::1", "13003")),
        ("http://u:p@h:1/x", ("h", "1")),
        ("fd00::1", ("fd00::1", "")),
        ("host", ("host", "")),
        ("", ("", "")),
    ],
)
def test_address_is_split(address: str, parts: tuple[str, str]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--max_model_len 5 --enforce-eager", {"--max-model-len": ("5",), "--enforce-eager": ()}),
        ("--max-model-len=5", {"--max-model-len": ("5",)}),
        ("--tensor-par 2", {"--tensor-parallel-size": ("2",)}),
        ("--port 1 --port 2", {"--port": ("2",)}),
        ("--served-model-name a b --seed -1", {"--served-model-name": ("a", "b"), "--seed": ("-1",)}),
        ("--kv-transfer-config {a: b, c: d} --port 1", {"--kv-transfer-config": ("{a: b, c: d}",), "--port": ("1",)}),
    ],
)
def test_flags_are_split_as_v0_does(words: str, names: dict[str, tuple[str, ...]]) -> None:
    arguments = parse_server(["vllm", "serve", "m", *words.split(" ")])
    assert {flag.name: flag.values for flag in arguments.flags} == names
    assert arguments.model == "m"


def test_docker_run_options_are_told_from_the_image() -> None:
    line = (
        "docker run -d --rm -it --gpus all -p 127.0.0.1:81:80/tcp -v /a:/b:ro --mount type=bind,src=/c,dst=/d "
        "-e A=1 -e B --env-file x.env --network=host --shm-size 16g img:1 --model m"
    )
    run = parse_docker_run(line.split(), {"B": "2"})
    assert (run.image, run.arguments) == ("img:1", ("--model", "m"))
    assert run.env == (("A", "1"), ("B", "2"))
    assert run.mounts == (("/b", "/a"), ("/d", "/c"))
    assert run.ports == (("81", "80"),)


@pytest.mark.parametrize(
    ("text", "value"),
    [("${A}-$A", "1-1"), ("${B:-x}", "x"), ("$$A", "$A"), ("${B}", "${B}"), ("${A:+y}", "y"), ("${B:?needed}", "${B}")],
)
def test_compose_interpolation(text: str, value: str) -> None:
    assert interpolate(text, {"A": "1"}) == value


def test_env_file() -> None:
    assert parse_env_file("# c\nexport A=1\nB='x y' \nC=z # note\n\nnot one\n") == [
        ("A", "1"),
        ("B", "x y"),
        ("C", "z"),
    ]
    assert looks_like_env_file("A=1\nB=\n")
    assert not looks_like_env_file("A=1 vllm serve m\n")


def test_unit_continuations_and_comments() -> None:
    entries = parse_unit("[Service]\n# c\nExecStart=/a \\\n  # not here\n  --b \\\n  --c\nEnvironment=X=1\n")
    assert entries == [("Service", "ExecStart", "/a --b --c", 3), ("Service", "Environment", "X=1", 7)]


def test_a_service_named_vllm_blocks_unless_links_are_off() -> None:
    service = "apiVersion: v1\nkind: Service\nmetadata: {name: vllm}\n---\n"
    pod = "apiVersion: v1\nkind: Pod\nspec:\n  LINKS\n  containers: [{image: vllm:1, args: [--model, m]}]\n"
    assert instances(service + pod.replace("  LINKS\n", "")).report.verdict == "blocked"
    assert instances(service + pod.replace("LINKS", "enableServiceLinks: false")).report.verdict == "ready with changes"


def test_a_file_that_is_too_large_or_binary_is_listed(tmp_path: object) -> None:
    folder = Path(str(tmp_path))
    (folder / "a.bin").write_bytes(b"\0vllm")
    (folder / "b.log").write_bytes(b"x" * 1_000_001)
    notes = {row["what"]: row["why"] for row in build([str(folder)], "0.33.0", {}).report.unread}
    assert notes["a.bin"] == "a binary file; not read"
    assert notes["b.log"].startswith("larger than 1,000,000 bytes")


def test_yaml_aliases_cannot_blow_up() -> None:
    bomb = "a: &a [x]\n" + "".join(f"k{i}: &k{i} [{', '.join(['*a'] * 10)}]\n" for i in range(20))
    report = instances("kind: vllm\n" + bomb).report
    assert any("YAML aliases" in row["why"] for row in report.unread)


def test_offline_python_is_listed_with_its_line(tmp_path: object) -> None:
    path = Path(str(tmp_path)) / "run.py"
    path.write_text("from vllm import LLM\nLLM('m', kv_transfer_config=3)\n")
    [row] = build([str(path)], "0.33.0", {}).report.unread
    assert row["place"].endswith("run.py:2")
    assert Place("x").file == "x"


@pytest.mark.parametrize("text", ["", "- a", "a: [", "3", "x: 2024-99-99"])
def test_a_config_file_that_is_no_mapping_gives_no_flags(text: str) -> None:
    assert config_words(text) == []


def test_flags_of_a_config_file() -> None:
    text = "port: 1\nenforce-eager: true\nenable-lora: false\nlora-modules: [a=b, c=d]\nhf-overrides: {x: 1}\n"
    expected = ["--port", "1", "--enforce-eager", "--lora-modules", "a=b", "c=d", "--hf-overrides", '{"x": 1}']
    assert config_words(text) == expected


SOURCES = sorted(Path(mooncake_v0.migrate.__file__).parent.glob("*.py"))
RUNNING = {"system", "popen", "Popen", "run", "call", "check_output", "check_call", "exec", "eval", "execv", "spawn"}
RUNNING |= {"expandvars", "import_module", "__import__"}


@pytest.mark.parametrize("path", SOURCES, ids=[path.name for path in SOURCES])
def test_the_package_has_no_way_to_execute_or_expand_what_it_reads(path: Path) -> None:
    tree = ast.parse(path.read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported & {"subprocess", "os", "pty", "ctypes", "runpy", "code"} == set()
    called = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = {func.id if isinstance(func, ast.Name) else getattr(func, "attr", "") for func in called}
    assert names & RUNNING == set()
