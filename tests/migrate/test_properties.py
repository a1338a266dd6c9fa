"""For any input: a report or a clear refusal, no execution, no secret, valid output."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncake_v0.errors import MooncakeV0Error
from mooncake_v0.migrate.emit import launch_files
from mooncake_v0.migrate.render import FORMATS, render
from mooncake_v0.migrate.report import Migration, build
from tests.migrate.deployments import FIXTURES, NEWEST

MANY = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
TEXTS = [path.read_text() for path in sorted(FIXTURES.rglob("*")) if path.is_file()]
SNIPPETS = [
    "vllm serve",
    "python3 -m vllm.entrypoints.openai.api_server",
    "--kv-transfer-config",
    '\'{"kv_role":"kv_producer"}\'',
    "--model m",
    "--port",
    "\\\n",
    "$(touch EXECUTED)",
    "`touch EXECUTED`",
    *("${X:-1}", "<<EOF\n", "EOF\n", "|", ";", "&&", "{", "}", '"', "'", "&a", "*a", "- ", "\t", "\x00", "é", "\u2028"),
    *("services:\n", "  a:\n", "    command: ", "kind: Pod\n", "apiVersion: v1\n", "[Service]\n", "ExecStart="),
    *("[program:x]\n", "docker run ", "ssh h ", "bash -c ", "for i in 1 2; do ", "done\n", "f() {", "#SBATCH\n"),
]
NAMES = ["a.sh", "a.yaml", "a.json", "a.service", "a.conf", "a.py", "README.md", ".env", "Dockerfile", "a"]


class _Balanced(HTMLParser):
    """Fails if a script or an element with a handler is there that the template does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts = 0

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.scripts += tag == "script"
        assert tag not in ("img", "iframe", "object", "embed")
        assert not any(name.startswith("on") for name, _ in attributes)


def report_of(folder: Path, name: str, text: str) -> Migration | None:
    (folder / name).write_bytes(text.encode("utf-8", errors="surrogatepass"))
    before = sorted(os.listdir(folder))
    try:
        return build([str(folder / name)], NEWEST, {})
    except MooncakeV0Error as error:
        assert error.what and error.fix
        return None
    finally:
        assert sorted(os.listdir(folder)) == before
        assert not Path("EXECUTED").exists()


def check_outputs(read: Migration) -> None:
    outputs = {form: render(read.report, form) for form in FORMATS}
    json.loads(outputs["json"])
    page = _Balanced()
    page.feed(outputs["html"])
    assert page.scripts == 1
    outputs["text"].encode("utf-8")
    for name, text in launch_files(read).items():
        assert "/" not in name
        text.encode("utf-8")


@MANY
@given(
    name=st.sampled_from(NAMES), parts=st.lists(st.one_of(st.sampled_from(SNIPPETS), st.text(max_size=12)), max_size=30)
)
def test_any_text_gives_a_report_or_a_clear_refusal(
    tmp_path_factory: pytest.TempPathFactory, name: str, parts: list[str]
) -> None:
    read = report_of(tmp_path_factory.mktemp("any"), name, " ".join(parts))
    assert read is None or check_outputs(read) is None


@MANY
@given(content=st.binary(max_size=300), name=st.sampled_from(NAMES))
def test_any_bytes_give_a_report_or_a_clear_refusal(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str
) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    (folder / name).write_bytes(content)
    check_outputs(build([str(folder)], NEWEST, {}))


@MANY
@given(data=st.data(), name=st.sampled_from(NAMES))
def test_a_real_deployment_cut_and_spliced_gives_a_report(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, name: str
) -> None:
    text = data.draw(st.sampled_from(TEXTS))
    cut = data.draw(st.integers(0, len(text)))
    length = data.draw(st.integers(0, 40))
    text = text[:cut] + data.draw(st.sampled_from(SNIPPETS)) + text[cut + length :]
    read = report_of(tmp_path_factory.mktemp("cut"), name, text)
    assert read is None or check_outputs(read) is None


WORDS = st.text(
    st.characters(codec="utf-8", exclude_characters="\0\r", exclude_categories=["Cs"]), min_size=1, max_size=20
)


@MANY
@given(words=st.lists(WORDS.filter(lambda word: not word.startswith("-")), min_size=1, max_size=4))
def test_words_in_quotes_are_read_as_a_shell_reads_them(words: list[str]) -> None:
    line = "vllm serve m --served-model-name " + " ".join(map(shlex.quote, words))
    [item] = build(["-"], NEWEST, {}, line).deployment.instances()
    assert list(item.arguments.flags[0].values) == words


@settings(max_examples=20, deadline=None)
@given(words=st.lists(WORDS.filter(lambda word: not word.startswith("-")), min_size=1, max_size=4))
def test_bash_reads_an_emitted_script_as_the_report_says_and_runs_nothing(
    tmp_path_factory: pytest.TempPathFactory, words: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("bash")
    read = build(["-"], NEWEST, {}, "vllm serve m --served-model-name " + " ".join(map(shlex.quote, words)))
    script = launch_files(read)["instance-1.sh"].replace("exec vllm", 'printf "%s\\0"')
    ran = subprocess.run(
        ["bash", "-c", script], capture_output=True, cwd=folder, timeout=20, env={"PATH": "/usr/bin:/bin"}
    )
    expected = ["serve", "m", "--served-model-name", *words]
    masked = [read.secrets.mask(word) for word in expected]
    assert [word.decode() for word in ran.stdout.split(b"\0")[:-1]] == masked, ran.stderr
    assert os.listdir(folder) == []
