"""`mooncake-v0 metadata` as its user runs it: in a process of its own, against real stores."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator

import pytest

from mooncake_v0.metadata.store import open_store
from tests import servers
from tests.unit.metadata.builders import entry_of, ram, record, rpc_meta

COMMAND = [sys.executable, "-m", "mooncake_v0", "metadata"]
SECRET = "geheim-77"
ALL_READING = (["ls"], ["check"], ["export"], ["get", "key"], ["watch", "--for", "1"], ["prune", "--yes"])


def run(*arguments: str, stdin: bytes = b"", env: dict[str, str] | None = None) -> tuple[int, str, str]:
    done = subprocess.run(
        [*COMMAND, *arguments], input=stdin, capture_output=True, timeout=60, env={**os.environ, **(env or {})}
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/keys.db"


@pytest.fixture
def living_and_dead(url: str) -> Iterator[tuple[str, list[str]]]:
    """A store with one living segment (a listening port) and two dead ones, all of this host."""
    here = socket.gethostname()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        living = f"127.0.0.1:{listener.getsockname()[1] - 1}"
        dead = [f"127.0.0.1:{port - 1}" for port in servers.free_ports(2)]
        store = open_store(url)
        for name in (living, *dead):
            seen_ago_s = 1.0 if name == living else 500.0
            mine = entry_of(record(name, hostname=here, pid=os.getpid(), seen_ago_s=seen_ago_s, rank=len(name)))
            for entry in (ram(name), rpc_meta(name), mine):
                store.put(entry.key, entry.value)
        store.put("foreign/key", b"1")
        store.close()
        yield living, sorted(dead)


def test_a_key_is_put_read_and_removed(url: str) -> None:
    assert run("put", url, "a key", "value") == (0, "", "")
    assert run("get", url, "a key") == (0, "value", "")
    assert run("rm", url, "a key", "other") == (1, "", "no key 'other'\n")
    assert run("get", url, "a key") == (1, "", "no key 'a key'\n")


def test_a_value_comes_from_standard_input_byte_for_byte(url: str) -> None:
    run("put", url, "a", stdin=b"\x00line\r\n")

    assert run("get", url, "a")[1] == "\x00line\r\n"


def test_ls_shows_who_lives_and_who_is_stale(url: str, living_and_dead: tuple[str, list[str]]) -> None:
    living, dead = living_and_dead

    code, out, _ = run("ls", url)
    rows = {line.split()[0]: line for line in out.splitlines()[1:]}

    assert code == 0
    assert sorted(rows) == sorted([living, *dead])
    assert "alive" in rows[living] and "answers" in rows[living] and "prefill" in rows[living]
    assert all("stale" in rows[name] and "nobody listens" in rows[name] for name in dead)


def test_ls_as_json_holds_every_field(url: str, living_and_dead: tuple[str, list[str]]) -> None:
    rows = json.loads(run("ls", url, "--format", "json")[1])["segments"]

    states = {row["name"]: row["state"] for row in rows}
    assert states == {living_and_dead[0]: "alive", **{name: "stale" for name in living_and_dead[1]}}
    assert {"role", "rank", "protocol", "address", "age_s", "hostname", "pid", "keys"} <= set(rows[0])


def test_ls_has_no_colour_codes_in_a_pipe_or_with_no_color(url: str, living_and_dead: tuple[str, list[str]]) -> None:
    assert "\x1b" not in run("ls", url)[1] + run("ls", url, env={"NO_COLOR": "1", "FORCE_COLOR": "1"})[1]


def test_prune_removes_exactly_the_dead(url: str, living_and_dead: tuple[str, list[str]]) -> None:
    living, dead = living_and_dead

    code, out, _ = run("prune", url, "--yes", "--format", "json")
    store = open_store(url)
    left = [entry.key for entry in store.list("")]
    store.close()

    assert (code, [row["name"] for row in json.loads(out)["stale"]]) == (0, dead)
    assert len(json.loads(out)["removed_keys"]) == 6
    of_living = [f"mooncake-v0/instances/{living}", f"mooncake/ram/{living}", f"mooncake/rpc_meta/{living}"]
    assert left == ["foreign/key", *of_living]


@pytest.mark.parametrize(("arguments", "stdin", "code"), [(["--dry-run"], b"", 0), ([], b"n\n", 1)])
def test_prune_removes_nothing_unless_told(
    url: str, living_and_dead: tuple[str, list[str]], arguments: list[str], stdin: bytes, code: int
) -> None:
    found, out, _ = run("prune", url, *arguments, stdin=stdin)
    store = open_store(url)
    count = len(store.list(""))
    store.close()

    assert (found, count) == (code, 10)
    assert all(name in out for name in living_and_dead[1])


def test_prune_removes_what_it_asked_about_after_a_yes(url: str, living_and_dead: tuple[str, list[str]]) -> None:
    code, out, err = run("prune", url, stdin=b"y\n")

    assert (code, "remove the keys of 2 dead segments?" in err, out.splitlines()[-1].strip()) == (
        0,
        True,
        "removed 6 keys",
    )


def test_check_explains_and_says_so_in_its_exit_code(url: str, living_and_dead: tuple[str, list[str]]) -> None:
    code, out, _ = run("check", url)
    as_json = json.loads(run("check", url, "--format", "json")[1])

    assert code == 1
    assert out.count("[metadata-stale-segment]") == 2 and out.count("fix: remove its keys") == 2
    assert {finding["rule"] for finding in as_json["findings"]} == {
        "metadata-stale-segment",
        "metadata-loopback-published",
    }


def test_check_of_an_empty_store_is_good(url: str) -> None:
    assert run("check", url) == (0, "0 segments, 0 findings\n", "")


def test_an_export_goes_into_another_kind_of_store(tmp_path: Path, url: str) -> None:
    redis = servers.start_redis(tmp_path)
    store = open_store(url)
    store.put("mooncake/ram/a", b"\xff\x00")
    store.put("mooncake/ram/b", b"{}")
    store.put("foreign", b"1")
    store.close()
    file = tmp_path / "keys.jsonl"

    exported = run("export", url, "-o", str(file))
    dry = run("import", redis.url, str(file), "--dry-run")
    first = run("import", redis.url, str(file))
    second = run("import", redis.url, "-", stdin=file.read_bytes())
    other = open_store(redis.url)
    arrived = {entry.key: entry.value for entry in other.list("")}
    other.close()
    redis.stop()

    assert exported == (0, "", "2 keys\n")
    assert dry[1] == "would write 2 keys, left 0 as they are\n"
    assert (first[1], second[1]) == (
        "wrote 2 keys, left 0 as they are\n",
        "wrote 0 keys, left 2 as they are\n",
    )
    assert arrived == {"mooncake/ram/a": b"\xff\x00", "mooncake/ram/b": b"{}"}


def test_watch_prints_changes_until_its_time_is_over(url: str) -> None:
    watching = subprocess.Popen(
        [*COMMAND, "watch", url, "--for", "4", "--format", "json"], stdout=subprocess.PIPE, text=True
    )
    assert watching.stdout is not None
    store = open_store(url)

    def changed() -> bool:
        store.put("mooncake/a", str(time.monotonic()).encode())
        return _has_output(watching)

    servers.wait_until(changed, "the first change", 10)
    first = json.loads(watching.stdout.readline())
    watching.stdout.close()
    assert watching.wait(60) in (0, 141)  # 141: a change came after the pipe was closed
    store.close()

    assert (first["kind"], first["key"]) == ("put", "mooncake/a")


def _has_output(process: subprocess.Popen[str]) -> bool:
    import select

    return bool(select.select([process.stdout], [], [], 0.2)[0])


def test_the_store_is_found_through_a_mooncake_json(tmp_path: Path, url: str) -> None:
    config = tmp_path / "mooncake.json"
    config.write_text(json.dumps({"metadata_server": url, "prefill_url": "x"}))

    assert run("ls", str(config)) == (0, "no segments\n", "")
    assert run("ls", env={"MOONCAKE_CONFIG_PATH": str(config)}) == (0, "no segments\n", "")


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["ls"], 2, "Missing argument"),
        (["ls", "missing.json"], 2, "no such file"),
        (["ls", "foo"], 1, "not a metadata store URL"),
        (["ls", "sqlite:///missing-folder/x.db"], 1, "does not exist"),
        (["get", "memory:", b"\xff".decode("utf-8", "surrogateescape")], 2, "UTF-8"),
        (["serve", "--store", "foo"], 1, "not a metadata store URL"),
        (["serve", "--host", "192.0.2.1", "--port", "0"], 1, "cannot listen on 192.0.2.1"),
        (["serve", "--token-file", "missing"], 1, "'missing' could not be read"),
        (["serve", "--port", "70000"], 2, "70000"),
        (["import", "memory:", "/dev/null"], 1, "/dev/null is empty"),
    ],
)
def test_a_wrong_call_gets_one_clear_error(arguments: list[str], code: int, part: str) -> None:
    found, out, err = run(*arguments)

    assert (found, out, part in err, "Traceback" in err) == (code, "", True, False)


AWAY = [(words, f"redis://u:{SECRET}@127.0.0.1:1") for words in ALL_READING]


@pytest.mark.parametrize(("words", "url"), [*AWAY, (["ls"], f"etcd://u:{SECRET}@127.0.0.1:1")])
def test_a_store_that_is_away_is_exit_code_2_without_its_password(words: list[str], url: str) -> None:
    code, out, err = run(words[0], url, *words[1:])

    assert (code, out, "127.0.0.1:1" in err, SECRET in err, "Traceback" in err) == (2, "", True, False, False)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """A running `metadata serve` with a token and a store password, its URL, and its log."""
    (tmp_path / "token").write_text(SECRET)
    log = tmp_path / "log"
    redis = servers.start_redis(tmp_path, "--requirepass", SECRET)
    with log.open("w") as err:
        process = subprocess.Popen(
            [*COMMAND, "serve", "--port", "0", "--token-file", str(tmp_path / "token")],
            env={**os.environ, "MOONCAKE_V0_STORE": redis.url.replace("://", f"://:{SECRET}@")},
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
        )
    assert process.stdout is not None
    yield process, process.stdout.readline().strip(), log
    process.kill()
    process.wait(10)
    process.stdout.close()
    redis.stop()


def test_serve_says_its_url_keeps_its_secrets_and_stops_on_sigterm(
    served: tuple[subprocess.Popen[str], str, Path], tmp_path: Path
) -> None:
    process, url, log = served
    with_login = url.replace("://", f"://any:{SECRET}@")

    refused = run("get", url, "a")
    wrong = run("get", url.replace("://", "://any:wrong@"), "a")
    written = run("put", with_login, "a", "1")
    with_token = run("get", url, "a", "--token-file", str(tmp_path / "token"))
    process.send_signal(signal.SIGTERM)
    code = process.wait(10)

    assert (refused[0], wrong[0], written[0], with_token) == (1, 1, 0, (0, "1", ""))
    assert code == 0
    said = "".join([*refused[1:], *wrong[1:], *written[1:], log.read_text(), url])
    assert SECRET not in said


def test_serve_off_loopback_without_a_login_says_who_can_write() -> None:
    process = subprocess.Popen(
        [*COMMAND, "serve", "--host", "0.0.0.0", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    _, err = process.communicate(timeout=10)

    assert (process.returncode, "whoever reaches 0.0.0.0 can read and write" in err) == (0, True)


def test_serve_on_a_busy_port_says_so_and_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, out, err = run("serve", "--port", str(taken.getsockname()[1]))

    assert (code, out, "cannot listen" in err, "Traceback" in err) == (1, "", True, False)


def test_keys_are_completed_while_typing(url: str) -> None:
    store = open_store(url)
    store.put("mooncake/ram/a:1", b"1")
    store.put("other", b"1")
    store.close()
    words = f"mooncake-v0 metadata get {url} moon"
    env = {"_MOONCAKE_V0_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "4"}

    done = subprocess.run(
        [sys.executable, "-m", "mooncake_v0"], env={**os.environ, **env}, capture_output=True, text=True, timeout=30
    )

    assert done.stdout == "plain,mooncake/ram/a:1\n"


def test_a_store_that_does_not_answer_completes_to_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        words = f"mooncake-v0 metadata get http://127.0.0.1:{silent.getsockname()[1]}/metadata moon"
        env = {"_MOONCAKE_V0_COMPLETE": "bash_complete", "COMP_LINE": words, "COMP_POINT": str(len(words))}
        done = subprocess.run(
            [sys.executable, "-m", "mooncake_v0"], env={**os.environ, **env}, capture_output=True, text=True, timeout=60
        )

    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
