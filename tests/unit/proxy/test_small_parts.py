"""Headers, keys, pair sources, guards and the retry budget."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mooncake_v0.errors import CouldNotCheckError, ProxyError
from mooncake_v0.proxy.access_log import AccessLog
from mooncake_v0.proxy.guard import Cut, Watchdog
from mooncake_v0.proxy.headers import forwarded, request_id_of, returned
from mooncake_v0.proxy.keys import Keys, read_key_file
from mooncake_v0.proxy.pair_source import FileSource, Follower, check_url
from mooncake_v0.proxy.record import Record
from mooncake_v0.proxy.relay import RetryBudget
from mooncake_v0.proxy.settings import PairSpec


@pytest.mark.parametrize("given", [b"", b"a b", b"a\r\nx: y", b"\xff", b"x" * 201])
def test_unsafe_request_id_is_replaced(given: bytes) -> None:
    made = request_id_of([(b"x-request-id", given)])

    assert made.encode() != given
    assert len(made) == 32


def test_clients_key_is_kept_from_the_instances_when_the_proxy_checks_it() -> None:
    sent = [(b"authorization", b"Bearer client"), (b"x", b"1")]

    assert dict(forwarded(sent, "id", "", keep_authorization=False)) == {"x": "1", "x-request-id": "id"}
    assert dict(forwarded(sent, "id", "own"))["authorization"] == "Bearer own"
    assert dict(forwarded(sent, "id", ""))["authorization"] == "Bearer client"


def test_header_values_of_any_byte_survive_both_ways() -> None:
    value = bytes(range(0xA0, 0x100))

    assert dict(forwarded([(b"x", value)], "id", ""))["x"].encode("latin-1") == value
    assert dict(returned([(b"X", value)], "id"))[b"x"] == value


@pytest.mark.parametrize("header", [b"Bearer b", b"bearer  b "])
def test_one_of_several_keys_is_enough(header: bytes) -> None:
    assert Keys(["a", "b"]).accepts(header)


def test_key_file_without_a_key_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none\n\n")

    with pytest.raises(ProxyError, match="holds no key"):
        read_key_file(tmp_path / "keys")
    with pytest.raises(CouldNotCheckError, match="cannot read"):
        read_key_file(tmp_path / "missing")


@pytest.mark.parametrize(
    "url",
    ["", "host:80", "ftp://a", "http://", "http://a:x", "http://a:0", "http://u:p@a", "http://a/?q=1", "http://a#f"],
)
def test_wrong_url_is_told_with_its_place(url: str) -> None:
    with pytest.raises(ProxyError, match="here"):
        check_url(url, "here")


@pytest.mark.parametrize("url", ["http://a:80", "https://a", "http://[::1]:8000", "http://a:80/prefix"])
def test_good_url_loses_only_its_last_slash(url: str) -> None:
    assert check_url(url + "/", "here") == url


def test_json_and_toml_pair_files_mean_the_same(tmp_path: Path) -> None:
    rows = [{"name": "a", "prefill": "http://p:1", "decode": "http://d:1"}]
    (tmp_path / "pairs.json").write_text(json.dumps({"pairs": rows}))
    (tmp_path / "pairs.toml").write_text('[[pairs]]\nname="a"\nprefill="http://p:1"\ndecode="http://d:1/"\n')

    read = [FileSource(tmp_path / name).read() for name in ("pairs.json", "pairs.toml")]

    assert read[0] == read[1] == (PairSpec("a", "http://p:1", "http://d:1"),)


class Changes:
    """What a follower did."""

    def __init__(self, *, keep: bool = False, alive: bool = True) -> None:
        self.seen: list[str] = []
        self.follower = Follower(
            FileSource(Path("unused")),
            add=lambda pair: self.seen.append(f"+{pair.name}"),
            remove=lambda name: self.seen.append(f"-{name}"),
            alive=lambda name: alive,
            counted=lambda result: None,
            keep_alive_pairs=keep,
        )


A, B = PairSpec("a", "http://p:1", "http://d:1"), PairSpec("b", "http://p:2", "http://d:2")
A_MOVED = PairSpec("a", "http://p:9", "http://d:1")


def test_follower_acts_on_differences_only() -> None:
    changes = Changes()

    results = [changes.follower.apply(pairs) for pairs in ([A], [A], [A, B], [A_MOVED, B], [B])]

    assert changes.seen == ["+a", "+b", "-a", "+a", "-a"]
    assert results == [True, False, True, True, True]


@pytest.mark.parametrize(("alive", "expected"), [(True, ["+a"]), (False, ["+a", "-a"])])
def test_pair_that_answers_outlives_its_record(alive: bool, expected: list[str]) -> None:
    changes = Changes(keep=True, alive=alive)

    changes.follower.apply([A])
    changes.follower.apply([])

    assert changes.seen == expected


async def test_late_step_is_cut_and_says_which() -> None:
    watchdog = Watchdog()
    running = asyncio.ensure_future(watchdog.run())
    guard = watchdog.watch()
    guard.expect("prefill", 0.05)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(10)
    cut = guard.explain()

    assert isinstance(cut, Cut)
    assert cut.cause == "prefill"
    assert guard.explain() is None
    await asyncio.sleep(0)  # the cancellation is spent
    running.cancel()


async def test_finished_request_is_never_cut() -> None:
    watchdog = Watchdog()
    guard = watchdog.watch()
    guard.expect("decode", -1)
    watchdog.forget(guard)

    watchdog.sweep(1e18)
    guard.cut("client_gone")

    await asyncio.sleep(0)
    assert guard.cause == ""


def test_retries_are_a_fifth_of_the_requests_and_a_few() -> None:
    budget = RetryBudget()

    at_once = sum(budget.spend() for _ in range(10))
    for _ in range(100):
        budget.earn()
    later = sum(budget.spend() for _ in range(100))

    assert at_once == 3
    assert 19 <= later <= 20


class SlowDisk(io.StringIO):
    """A stream whose writes wait until they are let through."""

    def __init__(self) -> None:
        super().__init__()
        self.let_through = threading.Event()

    def write(self, text: str) -> int:
        self.let_through.wait(10)
        return super().write(text)


def test_slow_disk_holds_up_no_request_and_loses_no_line() -> None:
    disk = SlowDisk()
    log = AccessLog(disk)
    with ThreadPoolExecutor(max_workers=1) as writer:
        for number in range(100):
            log.write(Record(f"r{number}", "/v1/completions"))
            log.flush(writer)  # returns though the disk has taken nothing yet
        disk.let_through.set()
    log.close()

    assert [json.loads(line)["request_id"] for line in disk.getvalue().splitlines()] == [f"r{n}" for n in range(100)]


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_full_disk_does_not_end_the_service(caplog: pytest.LogCaptureFixture) -> None:
    log = AccessLog(FullDisk())
    log.write(Record("r", "/v1/completions"))

    log.close()

    assert "1 lines of the access log are lost" in caplog.text
