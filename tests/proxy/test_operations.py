"""Keys, CORS, metrics, the log, the admin port and its page: what an operator sees and sets."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mooncake_v0.proxy.core import Sources
from mooncake_v0.proxy.settings import PairSpec
from tests.proxy.backend import Backend, answer, vllm_error
from tests.proxy.conftest import PATIENT, Running, StartProxy, eventually

BODY = {"model": "tiny", "prompt": "a secret prompt", "max_tokens": 4}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
async def keyed(start_proxy: StartProxy, tmp_path: Path) -> Running:
    """A proxy that checks its clients and its administrators."""
    (tmp_path / "clients").write_text("# team a\nkey-a\n\nkey-b\n")
    (tmp_path / "admins").write_text("admin-key\n")
    backends = [await Backend().start(), await Backend().start()]
    sources = Sources(
        pairs=(PairSpec("only", backends[0].url, backends[1].url),),
        client_key_file=tmp_path / "clients",
        admin_key_file=tmp_path / "admins",
    )
    running = await start_proxy(sources=sources, upstream_key="for-vllm")
    running.pairs[0].prefill, running.pairs[0].decode = backends
    return running


@pytest.mark.parametrize("header", ["", "Bearer wrong", "Bearer ", "Basic key-a", "key-a", "Bearer key-a key-b"])
@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
async def test_wrong_key_is_401_and_reaches_no_instance(keyed: Running, header: str, path: str) -> None:
    status, _, body = await keyed.post(BODY, path, headers={"authorization": header} if header else {})

    assert status == 401
    assert json.loads(body)["error"]["code"] == "invalid_api_key"
    assert keyed.prefill.posts() == keyed.decode.posts() == []


@pytest.mark.parametrize("key", ["key-a", "key-b"])
async def test_right_key_is_exchanged_for_the_instances_own(keyed: Running, key: str) -> None:
    status, _, _ = await keyed.post(BODY, headers={"authorization": f"Bearer {key}"})

    assert status == 200
    assert keyed.prefill.posts()[0].headers["authorization"] == "Bearer for-vllm"
    assert keyed.decode.posts()[0].headers["authorization"] == "Bearer for-vllm"
    await eventually(lambda: bool(keyed.log_lines()))
    seen = keyed.log.getvalue() + keyed.proxy.metrics.render().decode()
    assert re.findall("key-a|key-b|for-vllm|secret", seen) == []


async def test_changed_key_file_is_taken_over(keyed: Running, tmp_path: Path) -> None:
    (tmp_path / "clients").write_text("key-c\n")
    os.utime(tmp_path / "clients", (1, 1))

    await eventually(lambda: keyed.proxy.client_keys.accepts(b"Bearer key-c"))

    assert (await keyed.post(BODY, headers={"authorization": "Bearer key-a"}))[0] == 401
    assert (await keyed.post(BODY, headers={"authorization": "Bearer key-c"}))[0] == 200


async def test_key_file_that_becomes_empty_does_not_open_the_door(keyed: Running, tmp_path: Path) -> None:
    (tmp_path / "clients").write_text("")
    os.utime(tmp_path / "clients", (1, 1))
    await asyncio.sleep(0.6)

    assert (await keyed.post(BODY))[0] == 401
    assert (await keyed.post(BODY, headers={"authorization": "Bearer key-a"}))[0] == 200


@pytest.mark.parametrize("path", ["/health", "/livez", "/metrics"])
async def test_probes_need_no_key(keyed: Running, path: str) -> None:
    async with keyed.client.get(keyed.url + path) as response:
        assert response.status == 200


async def admin(running: Running, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    options = {"json": body} if body is not None else {}
    async with running.client.request(method, running.admin_url + path, headers=headers, **options) as response:
        text = await response.text()
        return response.status, json.loads(text) if response.content_type == "application/json" else text


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/status"), ("GET", "/pairs"), ("POST", "/pairs"), ("DELETE", "/pairs/only")]
)
async def test_admin_paths_need_the_admin_key_and_not_a_clients(keyed: Running, method: str, path: str) -> None:
    assert (await admin(keyed, method, path, {}))[0] == 401
    assert (await admin(keyed, method, path, {}, key="key-a"))[0] == 401
    assert (await admin(keyed, "GET", "/status", key="admin-key"))[0] == 200


async def test_pairs_can_be_added_drained_resumed_and_removed(start_proxy: StartProxy) -> None:
    running = await start_proxy()
    extra = [await Backend().start(), await Backend().start()]
    new = {"name": "new", "prefill": extra[0].url, "decode": extra[1].url}

    assert (await admin(running, "POST", "/pairs", new))[0] == 201
    assert (await admin(running, "POST", "/pairs", new))[0] == 409
    await running.until_up()
    assert (await admin(running, "POST", "/pairs/pair-0/drain", {}))[0] == 200
    statuses = [(await running.post({**BODY, "prompt": str(n)}))[0] for n in range(6)]
    drained = len(running.decode.posts())
    assert (await admin(running, "POST", "/pairs/pair-0/resume", {}))[1]["draining"] is False
    assert (await admin(running, "DELETE", "/pairs/new", {}))[0] == 200
    after = await running.post(BODY)

    assert statuses == [200] * 6
    assert drained == 0
    assert len(extra[1].posts()) == 6
    assert after[0] == 200
    assert [pair["name"] for pair in (await admin(running, "GET", "/pairs"))[1]["pairs"]] == ["pair-0"]
    for one in extra:
        await one.stop()


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/pairs", {"name": "x"}, 400),
        ("POST", "/pairs", {"name": "x", "prefill": "ftp://a", "decode": "http://b"}, 400),
        ("POST", "/pairs", [], 400),
        ("POST", "/pairs/none/drain", {}, 404),
        ("DELETE", "/pairs/none", {}, 404),
        ("PUT", "/pairs", {}, 405),
    ],
)
async def test_wrong_admin_request_is_told_what_is_wrong(
    start_proxy: StartProxy, method: str, path: str, body: Any, status: int
) -> None:
    running = await start_proxy()

    got, answered = await admin(running, method, path, body)

    assert got == status
    assert answered["error"]["message"]


async def test_page_of_another_origin_cannot_change_pairs(start_proxy: StartProxy) -> None:
    running = await start_proxy()

    async with running.client.post(running.admin_url + "/pairs/pair-0/drain", data=b"{}") as response:
        assert response.status == 415
    async with running.client.options(running.admin_url + "/pairs") as response:
        assert "access-control-allow-origin" not in response.headers

    assert not running.proxy.balancer.pairs["pair-0"].draining


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
async def test_status_page_shows_the_pairs_in_a_browser(start_proxy: StartProxy, tmp_path: Path) -> None:
    running = await start_proxy()
    await running.post(BODY)
    assert CHROMIUM is not None

    browser = await asyncio.create_subprocess_exec(
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}",
        "--virtual-time-budget=5000",
        "--dump-dom",
        running.admin_url + "/",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    page = (await asyncio.wait_for(browser.communicate(), 60))[0].decode()

    assert running.prefill.url in page
    assert running.decode.url in page
    assert "ready · 0 in flight" in page
    assert page.count('class="state up"') == 2


async def test_page_loads_nothing_from_elsewhere(start_proxy: StartProxy) -> None:
    running = await start_proxy()

    _, page = await admin(running, "GET", "/")

    assert re.findall(r"""(?:src|href)=|https?://|@import|url\(""", page) == []


async def test_cors_is_off_unless_asked(start_proxy: StartProxy) -> None:
    running = await start_proxy(decode=answer(200, b"{}", extra="access-control-allow-origin: *\r\n"))

    _, headers, _ = await running.post(BODY, headers={"origin": "https://page.example"})

    assert "access-control-allow-origin" not in headers


async def test_allowed_origin_may_call_from_a_browser(start_proxy: StartProxy) -> None:
    running = await start_proxy(cors_origins=("https://page.example",))

    _, good, _ = await running.post(BODY, headers={"origin": "https://page.example"})
    _, bad, _ = await running.post(BODY, headers={"origin": "https://other.example"})
    asked = {"origin": "https://page.example", "access-control-request-headers": "authorization"}
    async with running.client.options(running.url + "/v1/completions", headers=asked) as response:
        preflight = {name.lower(): value for name, value in response.headers.items()}

    assert good["access-control-allow-origin"] == "https://page.example"
    assert "access-control-allow-origin" not in bad
    assert preflight["access-control-allow-headers"] == "authorization"


async def test_metrics_agree_with_the_log(start_proxy: StartProxy) -> None:
    running = await start_proxy()
    await asyncio.gather(*(running.post({**BODY, "stream": n % 2 == 0}) for n in range(30)))
    running.decode.behaviour = answer(400, vllm_error(400))
    await asyncio.gather(*(running.post(BODY) for _ in range(7)))
    await running.post({**BODY, "min_tokens": 9})

    text = running.proxy.metrics.render().decode()
    lines = running.log_lines()

    def value(name: str) -> float:
        found = re.findall(rf"^mooncake_v0_proxy_{re.escape(name)} (\S+)$", text, re.M)
        return sum(float(one) for one in found)

    total_ms = sum(line["total_ms"] for line in lines)
    prefill_ms = sum(line["prefill_ms"] for line in lines)
    assert len(lines) == value("request_seconds_count") == 38
    assert value("request_seconds_sum") * 1000 == pytest.approx(total_ms, abs=0.05)
    assert value("prefill_seconds_sum") * 1000 == pytest.approx(prefill_ms, abs=0.05)
    assert value("prefill_seconds_count") == sum(line["prefill_ms"] > 0 for line in lines) == 37
    assert value('prefill_skipped_total{reason="invalid"}') == 1
    assert value('tokens_total{kind="completion"}') == 8 * 15
    ok = 'requests_total{disaggregated="yes",outcome="ok",pair="pair-0",path="/v1/completions",status="200"}'
    assert value(ok) == sum(line["outcome"] == "ok" for line in lines) == 30


@pytest.mark.parametrize(("prompt", "prefills"), [([1] * 15, 0), ([1] * 16, 1), ("short", 0), ("x" * 200, 1)])
async def test_short_prompts_skip_prefill_when_asked(start_proxy: StartProxy, prompt: Any, prefills: int) -> None:
    running = await start_proxy(min_prefill_tokens=16)

    status, headers, _ = await running.post({**BODY, "prompt": prompt})

    assert status == 200
    assert len(running.prefill.posts()) == prefills
    assert headers["x-mooncake-disaggregated"] == ("yes" if prefills else "skipped")


async def test_models_of_all_pairs_are_listed_once(start_proxy: StartProxy) -> None:
    running = await start_proxy(pairs=3)

    async with running.client.get(running.url + "/v1/models") as response:
        models = await response.json()

    assert [card["id"] for card in models["data"]] == ["tiny"]
    assert models["data"][0]["max_model_len"] == 4096


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_other_paths_of_vllm_go_to_decode_unchanged(start_proxy: StartProxy, path: str) -> None:
    running = await start_proxy(decode=answer(200, b'{"count":1}'))
    sent = b'{"model":"tiny",  "prompt":"x"}'

    status, _, body = await running.post(sent, path)

    assert (status, body) == (200, b'{"count":1}')
    assert running.decode.posts()[0].body == sent
    assert running.prefill.posts() == []


async def test_draining_proxy_says_so_and_closes_connections_after_the_answer(start_proxy: StartProxy) -> None:
    running = await start_proxy(limits=replace(PATIENT.limits))
    running.proxy.draining = True

    status, headers, _ = await running.post(BODY)
    async with running.client.get(running.url + "/health") as health:
        pass

    assert status == 200
    assert headers["connection"] == "close"
    assert health.status == 503
