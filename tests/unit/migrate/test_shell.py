"""The shell reader: what bash would make of a text, as far as that is possible without running it."""

from __future__ import annotations

import pytest

from mooncake_v0.migrate.commands import Scene
from mooncake_v0.migrate.records import Found, Place, TextFile
from mooncake_v0.migrate.shell import ShellReader
from mooncake_v0.migrate.shell_words import integer

FILES = {"common.env": "MODEL=Qwen/Q\nPORT=8100\n", "kv.json": '{"a": 1}\n'}


def read(text: str) -> Found:
    def lookup(path: str) -> TextFile | None:
        name = path.rpartition("/")[2]
        return TextFile(path, FILES[name], Place(path)) if name in FILES else None

    found = Found()
    ShellReader(text, Place("x.sh", 1), found, scene=Scene(lookup=lookup)).read()
    return found


def argv(text: str) -> list[str]:
    [invocation] = read(text).invocations
    return list(invocation.argv)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vllm serve m", ["vllm", "serve", "m"]),
        ("vllm serve 'a b' \"c d\" e\\ f", ["vllm", "serve", "a b", "c d", "e f"]),
        ("vllm serve m \\\n  --port \\\n 1 # 2", ["vllm", "serve", "m", "--port", "1"]),
        ("M=x; vllm serve $M ${M} \"$M-$M\" '$M'", ["vllm", "serve", "x", "x", "x-x", "$M"]),
        ("vllm serve ${M:-d} ${N-e} ${P:=f}", ["vllm", "serve", "d", "e", "f"]),
        ("M=x; vllm serve ${M:-d} ${M:+y} ${N:+z}m", ["vllm", "serve", "x", "y", "m"]),
        ("A='--port 1'; vllm serve $A \"$A\"", ["vllm", "serve", "--port", "1", "--port 1"]),
        ('A=(--port 1 "a b"); A+=(c); vllm serve "${A[@]}"', ["vllm", "serve", "--port", "1", "a b", "c"]),
        ('R=p; vllm serve \'{"r":"\'"$R"\'","n":\'$R\'}\'', ["vllm", "serve", '{"r":"p","n":p}']),
        ('vllm serve "{\\"a\\":1}" $\'x\\ty\'', ["vllm", "serve", '{"a":1}', "x\ty"]),
        ("P=8100; vllm serve $((P + 100)) $((2*3-1))", ["vllm", "serve", "8200", "5"]),
        ("vllm serve $UNKNOWN \"$(hostname -I)\" `id`", ["vllm", "serve", "${UNKNOWN}", "$(hostname -I)", "`id`"]),
        ("source ./common.env; vllm serve $MODEL --port $PORT", ["vllm", "serve", "Qwen/Q", "--port", "8100"]),
        ("vllm serve \"$(cat ./kv.json)\" $(< kv.json)x", ["vllm", "serve", '{"a": 1}', '{"a": 1}x']),
        ("nohup env -u X numactl -N 0 vllm serve m > log 2>&1 &", ["vllm", "serve", "m"]),
        ("timeout 5 bash -c 'exec vllm serve m'", ["vllm", "serve", "m"]),
        ("f() { vllm serve $1 --port $2; }; f m 3", ["vllm", "serve", "m", "--port", "3"]),
        ("conda run -n v python3.11 -u -m vllm.entrypoints.openai.api_server --model m",
         ["python3.11", "-u", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"]),
    ],
)  # fmt: skip
def test_words_of_a_command(text: str, words: list[str]) -> None:
    assert argv(text) == words


@pytest.mark.parametrize(
    ("text", "environment"),
    [
        ("A=1 vllm serve m", {"A": "1"}),
        ("export A=1 B='2 3'; C=4; vllm serve m", {"A": "1", "B": "2 3"}),
        ("A=1; export A; A=2; vllm serve m", {"A": "2"}),
        ("set -a; . common.env; set +a; X=1; vllm serve m", {"MODEL": "Qwen/Q", "PORT": "8100"}),
        ("A=1 env B=2 vllm serve m", {"A": "1", "B": "2"}),
        ("srun --export=ALL,A=1 -w n1 vllm serve m", {"A": "1"}),
    ],
)
def test_environment_of_a_command(text: str, environment: dict[str, str]) -> None:
    [invocation] = read(text).invocations
    assert dict(invocation.env) == environment


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("ssh -p 22 root@n1 vllm serve m", "n1"),
        ("ssh n1 <<'E'\nvllm serve m\nE\n", "n1"),
        ("for h in n1; do ssh $h 'vllm serve m'; done", "n1"),
        ("srun --nodelist=n1 vllm serve m", "n1"),
    ],
)
def test_host_of_a_command(text: str, host: str) -> None:
    [invocation] = read(text).invocations
    assert (invocation.host, invocation.argv) == (host, ("vllm", "serve", "m"))


def test_env_file_of_docker_run_is_read() -> None:
    found = read("docker run --env-file common.env -e PORT=1 vllm/vllm-openai:v0.6.4.post1 --model m")
    assert dict(found.invocations[0].env) == {"MODEL": "Qwen/Q", "PORT": "1"}


def test_a_loop_over_a_list_starts_one_instance_each() -> None:
    found = read("for i in 0 1 2; do CUDA_VISIBLE_DEVICES=$i vllm serve m --port 810$i & done")
    assert [invocation.argv[-1] for invocation in found.invocations] == ["8100", "8101", "8102"]


def test_both_sides_of_a_condition_are_read() -> None:
    found = read('if [ "$1" = p ]; then vllm serve a; else vllm serve b; fi; case x in y) vllm serve c;; esac')
    assert [invocation.argv[-1] for invocation in found.invocations] == ["a", "b", "c"]


@pytest.mark.parametrize("between", ["\\ \n", "\\\n  # --x \\\n", "\n"])
def test_a_broken_continuation_is_joined_and_noted(between: str) -> None:
    found = read(f"vllm serve m {between}  --port 1")
    assert found.invocations[0].argv == ("vllm", "serve", "m", "--port", "1")
    assert [note.why.split(",")[0] for note in found.unread] == ["the line continuation above is broken"]


def test_place_is_the_line_of_the_command() -> None:
    assert str(read("\n\n# x\nvllm serve m \\\n --port 1\n").invocations[0].place) == "x.sh:4"


def test_here_documents_become_files() -> None:
    found = read('H=h\ncat > a/mooncake.json <<EOF\n{"prefill_url": "$H:1"}\nEOF\ncat <<\'EOF\' | tee b.py\n$H\nEOF\n')
    assert [(file.path, file.text) for file in found.files][0] == ("a/mooncake.json", '{"prefill_url": "h:1"}\n')


@pytest.mark.parametrize("text", ["f() { f; }; f", "a() { b; }; b() { a; }; a", "x" * 5000, "(" * 500, "$(" * 200])
def test_endless_or_deep_text_ends(text: str) -> None:
    assert read(text).invocations == []


def test_a_command_that_mentions_vllm_and_is_not_understood_is_noted() -> None:
    assert [note.what for note in read("./serve-with-vllm.pl --kv-transfer-config x").unread] == [
        "./serve-with-vllm.pl --kv-transfer-config x"
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1+2*3", 7), ("(1+2)*3", 9), ("9**9", None), ("1/0", None), ("a", None), ("9" * 80, None)],
)
def test_arithmetic_is_limited_to_sums_and_products(text: str, value: int | None) -> None:
    assert integer(text) == value


ROLES = """
case "$1" in
  prefill) ROLE=kv_producer; PORT=8100 ;;
  decode) ROLE=kv_consumer; PORT=8200 ;;
  *) echo "usage: $0 prefill|decode"; exit 1 ;;
esac
etcd &
vllm serve m --port $PORT --kv-transfer-config '{"kv_role":"'$ROLE'"}'
"""
IFS = """
if [ "$ROLE" = p ]; then PORT=8100; elif [ "$ROLE" = d ]; then PORT=8200; else PORT=8300; fi
etcd &
vllm serve m --port $PORT
"""


@pytest.mark.parametrize(
    ("text", "ports"), [(ROLES, ["8100", "8200"]), (IFS, ["8100", "8200", "8300"])], ids=["case", "if"]
)
def test_a_script_for_several_roles_is_read_once_for_each(text: str, ports: list[str]) -> None:
    found = read(text)
    servers = [item for item in found.invocations if item.argv[0] == "vllm"]
    assert [item.argv[item.argv.index("--port") + 1] for item in servers] == ports
    assert [item.argv[0] for item in found.invocations].count("etcd") == 1


def test_eval_is_read_and_not_done() -> None:
    assert argv('eval "vllm serve m --port 9"') == ["vllm", "serve", "m", "--port", "9"]
