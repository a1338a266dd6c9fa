"""`validate --online` against a real etcd, real sockets and a copy of sysfs; its rules against facts as data."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Iterator

import pytest
from click.testing import CliRunner

from mooncake_v0.cli.validate import validate
from mooncake_v0.config.model import Endpoint, MooncakeConfig
from mooncake_v0.config.online import LISTENING, REFUSED, SILENT, ApiAnswer, ask_api, is_local, reach, resolve
from mooncake_v0.config.online_rules import ONLINE_RULES, HostFacts
from mooncake_v0.config.rdma import Gid, RdmaPort, chosen_gid, device_names, read_port
from mooncake_v0.metadata.store import open_store
from tests.servers import Server, free_ports, start_etcd

IPV4_GID = "0000:0000:0000:0000:0000:ffff:0a00:0001"
NULL_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
LINK_LOCAL_GID = "fe80:0000:0000:0000:0202:c9ff:fe00:0001"


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_etcd(tmp_path_factory.mktemp("etcd"))
    yield server
    server.stop()


@pytest.fixture(autouse=True)
def no_proxy_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def free_base() -> int:
    """A base port whose whole plan for one rank is free: base, base + 1, base + 32; and the same 100 above."""
    for base in range(20000, 32000, 150):
        with ExitStack() as stack:
            try:
                for offset in (0, 1, 32, 100, 101, 132):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", base + offset))
            except OSError:
                continue
            return base
    raise AssertionError("no free ports")


def run(folder: Path, *arguments: str, **fields: Any) -> tuple[int, dict[str, str]]:
    """Exit code and rule -> what, for a pair on loopback."""
    path = folder / "mooncake.json"
    path.write_text(json.dumps(fields))
    options = ["--online", "--timeout", "0.5", "--tp", "1", "--format", "json", *arguments]
    result = CliRunner().invoke(validate, [str(path), *options], standalone_mode=False)
    assert result.exception is None, result.exc_info
    diagnostics = json.loads(result.output)["files"][0]["diagnostics"]
    return result.return_value, {item["rule"]: item["what"] for item in diagnostics}


def loopback(base: int, etcd: Server, **fields: Any) -> dict[str, Any]:
    urls = {"prefill_url": f"127.0.0.1:{base}", "decode_url": f"127.0.0.1:{base + 100}"}
    return {**urls, "metadata_server": etcd.url, **fields}


def test_pair_with_a_running_etcd_and_free_ports_is_valid(tmp_path: Path, etcd: Server) -> None:
    assert run(tmp_path, **loopback(free_base(), etcd)) == (0, {})


def test_probe_leaves_no_key_behind(tmp_path: Path, etcd: Server) -> None:
    run(tmp_path, **loopback(free_base(), etcd))

    store = open_store(etcd.url)
    assert store.list("mooncake-v0/probe/") == []
    store.close()


def test_metadata_server_that_does_not_run_is_an_error(tmp_path: Path, etcd: Server) -> None:
    code, found = run(tmp_path, **loopback(free_base(), etcd, metadata_server=f"etcd://127.0.0.1:{free_ports(1)[0]}"))

    assert (code, set(found)) == (1, {"online-metadata-unreachable"})


class SaysYes(BaseHTTPRequestHandler):
    """Another web server: 200 to everything, and nothing is kept."""

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_GET = do_PUT = do_DELETE = answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_other_web_server_at_the_port_is_told_apart(tmp_path: Path, etcd: Server) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), SaysYes) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/metadata"
        code, found = run(tmp_path, **loopback(free_base(), etcd, metadata_server=url))
        server.shutdown()
        thread.join(10)

    assert (code, set(found)) == (1, {"online-metadata-wrong-answer"})


@pytest.mark.parametrize(("offset", "use"), [(0, "engine handshake"), (1, "engine data"), (32, "side channel")])
def test_port_that_is_taken_is_named_with_its_use(tmp_path: Path, etcd: Server, offset: int, use: str) -> None:
    base = free_base()
    with socket.create_server(("127.0.0.1", base + offset)):
        code, found = run(tmp_path, "--role", "prefill", **loopback(base, etcd))

    assert code == 1
    assert found["online-port-busy"] == f"port {base + offset} ({use} of rank 0) is taken on this machine"


def test_other_sides_port_does_not_count_with_role(tmp_path: Path, etcd: Server) -> None:
    base = free_base()
    with ExitStack() as stack:
        for offset in (100, 1, 32):  # decode's first port, and prefill's that decode connects to
            stack.enter_context(socket.create_server(("127.0.0.1", base + offset)))
        fields = loopback(base, etcd, decode_url=f"127.0.0.1:{base + 110}")

        assert run(tmp_path, "--role", "decode", **fields) == (0, {})


def test_peer_that_is_not_started_is_a_note(tmp_path: Path, etcd: Server) -> None:
    base = free_base()

    code, found = run(tmp_path, "--role", "decode", **loopback(base, etcd))

    assert (code, set(found)) == (0, {"online-peer-not-listening"})
    assert found["online-peer-not-listening"] == f"nothing listens at ports {base + 1}, {base + 32} of 127.0.0.1"


def test_port_that_drops_packets_is_told_from_one_that_refuses() -> None:
    with ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        open_port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        (closed_port,) = free_ports(1)
        # the kernel drops the next connection's packets once the queue of this listener is full
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        full_port = full.getsockname()[1]

        answers = reach("127.0.0.1", [full_port, open_port, closed_port], 0.5)

    assert answers == {full_port: SILENT, open_port: LISTENING, closed_port: REFUSED}


def test_name_that_cannot_be_looked_up_has_no_address() -> None:
    assert resolve("a" * 64 + ".example", 5.0) is None


def test_file_with_errors_is_not_taken_online(tmp_path: Path, etcd: Server) -> None:
    code, found = run(tmp_path, **loopback(free_base(), etcd, protocol="quic", metadata_server="etcd://127.0.0.1:1"))

    assert (code, set(found)) == (1, {"protocol-unknown", "online-skipped"})


def test_name_is_shown_with_its_address(tmp_path: Path, etcd: Server) -> None:
    base = free_base()

    code, found = run(tmp_path, **loopback(base, etcd, prefill_url=f"localhost:{base}"))

    assert code == 0
    assert found["online-name-resolved"] == "'localhost' is 127.0.0.1 here"


def test_proxy_variable_without_an_exception_is_a_warning(
    tmp_path: Path, etcd: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    fields = loopback(free_base(), etcd, metadata_server=f"http://127.0.0.1:{free_ports(1)[0]}/metadata")

    assert "http-proxy" in run(tmp_path, **fields)[1]
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert "http-proxy" not in run(tmp_path, **fields)[1]


class Models(BaseHTTPRequestHandler):
    """An OpenAI API that serves the model named by its server."""

    def do_GET(self) -> None:
        body = json.dumps({"object": "list", "data": [{"id": self.server.model}]}).encode()  # type: ignore[attr-defined]
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def api(address: str, model: str, port: int = 0) -> Iterator[int]:
    with ThreadingHTTPServer((address, port), Models) as server:
        server.model = model  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join(10)


@pytest.mark.parametrize(("decode_model", "rules"), [("tiny", set()), ("other", {"online-api-models"})])
def test_models_of_both_apis_are_compared(tmp_path: Path, etcd: Server, decode_model: str, rules: set[str]) -> None:
    base = free_base()
    fields = loopback(base, etcd, decode_url=f"127.0.0.2:{base + 100}")
    with api("127.0.0.1", "tiny") as port, api("127.0.0.2", decode_model, port):
        code, found = run(tmp_path, "--api-port", str(port), **fields)

    assert (code, set(found)) == (len(rules), rules)


def test_api_that_is_not_started_is_a_note(tmp_path: Path, etcd: Server) -> None:
    (port,) = free_ports(1)

    code, found = run(tmp_path, "--role", "prefill", "--api-port", str(port), **loopback(free_base(), etcd))

    assert code == 0
    assert found == {"online-api-not-running": f"no API answers at 127.0.0.1:{port}"}


def test_port_that_speaks_something_else_is_no_api(tmp_path: Path, etcd: Server) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), SaysYes) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        arguments = ["--role", "decode", "--api-port", str(server.server_port)]
        code, found = run(tmp_path, *arguments, **loopback(free_base(), etcd))
        server.shutdown()
        thread.join(10)

    assert (code, set(found)) == (1, {"online-api-wrong", "online-peer-not-listening"})


def test_port_that_never_answers_ends_with_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert ask_api("127.0.0.1", server.getsockname()[1], 0.3) == ApiAnswer(SILENT)


def make_device(root: Path, name: str, *, state: str = "4: ACTIVE", layer: str = "Ethernet", gids: Any = None) -> None:
    """One device in a copy of sysfs. gids: index -> (address, type)."""
    port = root / "class" / "infiniband" / name / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs" / "types").mkdir(parents=True)
    (port / "state").write_text(state + "\n")
    (port / "link_layer").write_text(layer + "\n")
    for index, (address, kind) in (gids or {0: (LINK_LOCAL_GID, "IB/RoCE v1"), 3: (IPV4_GID, "RoCE v2")}).items():
        (port / "gids" / str(index)).write_text(address + "\n")
        (port / "gid_attrs" / "types" / str(index)).write_text(kind + "\n")


def test_devices_are_looked_up_in_sysfs(tmp_path: Path, etcd: Server) -> None:
    make_device(tmp_path / "sys", "mlx5_0")
    make_device(tmp_path / "sys", "mlx5_1", state="1: DOWN")
    fields = loopback(free_base(), etcd, protocol="rdma", device_name="mlx5_1,mlx5_9")

    code, found = run(tmp_path, "--sysfs", str(tmp_path / "sys"), **fields)

    assert code == 1
    assert found["online-rdma-missing"] == "no RDMA device 'mlx5_9' on this machine; it has: mlx5_0, mlx5_1"
    assert found["online-rdma-inactive"] == "port 1 of mlx5_1 is 1: DOWN"


def test_active_device_with_a_usable_gid_has_no_finding(tmp_path: Path, etcd: Server) -> None:
    make_device(tmp_path / "sys", "mlx5_0")

    _, found = run(
        tmp_path, "--sysfs", str(tmp_path / "sys"), **loopback(free_base(), etcd, protocol="rdma", device_name="mlx5_0")
    )

    assert set(found) <= {"online-memlock"}


def test_host_without_rdma_drivers_has_no_devices(tmp_path: Path) -> None:
    assert device_names(tmp_path) == []
    assert read_port(tmp_path, "mlx5_0", 1) is None


@pytest.mark.parametrize(
    ("gids", "layer", "index", "chosen"),
    [
        (
            {0: (LINK_LOCAL_GID, "IB/RoCE v1"), 1: (LINK_LOCAL_GID, "RoCE v2"), 3: (IPV4_GID, "RoCE v2")},
            "Ethernet",
            0,
            3,
        ),
        ({0: (LINK_LOCAL_GID, "IB/RoCE v1"), 1: (LINK_LOCAL_GID, "RoCE v2")}, "Ethernet", 0, None),
        ({0: (LINK_LOCAL_GID, "IB/RoCE v1")}, "InfiniBand", 0, 0),
        ({0: (NULL_GID, ""), 1: (IPV4_GID, "RoCE v2")}, "Ethernet", 1, 1),
        ({0: (IPV4_GID, "RoCE v2")}, "Ethernet", 7, None),
    ],
)
def test_gid_is_chosen_as_the_engine_does(
    tmp_path: Path, gids: Any, layer: str, index: int, chosen: int | None
) -> None:
    make_device(tmp_path, "d", layer=layer, gids=gids)
    port = read_port(tmp_path, "d", 1)
    assert port is not None

    gid = chosen_gid(port, index)

    assert (gid.index if gid else None) == chosen


def test_own_addresses_are_told_from_others() -> None:
    assert is_local("127.0.0.1")
    assert not is_local("192.0.2.1")  # reserved for documentation, on no machine


def test_address_needs_no_resolver() -> None:
    assert resolve("192.0.2.1", 0.0) == "192.0.2.1"


TCP = MooncakeConfig(Endpoint("p", 13003), Endpoint("d", 13003), "etcd://10.0.0.9:2379", "tcp")
RDMA = replace(TCP, protocol="rdma", device_names=("mlx5_0",))
GOOD = HostFacts(TCP, 1, {"p": "10.0.0.1", "d": "10.0.0.2"}, ("prefill",))
GID = Gid(3, IPV4_GID, "RoCE v2")
ACTIVE = RdmaPort("mlx5_0", 1, "4: ACTIVE", "Ethernet", (GID,))
FACTS = [
    ("online-metadata-unreachable", replace(GOOD, metadata_failure="etcd does not answer")),
    ("online-metadata-wrong-answer", replace(GOOD, wrong_answer=True)),
    ("online-name", replace(GOOD, resolved={"p": "10.0.0.1", "d": None})),
    ("online-name-loopback", replace(GOOD, resolved={"p": "127.0.1.1", "d": "10.0.0.2"})),
    ("online-name-resolved", GOOD),
    ("online-ports-overlap", replace(GOOD, resolved={"p": "10.0.0.1", "d": "10.0.0.1"})),
    ("online-not-this-host", replace(GOOD, local=())),
    ("online-port-busy", replace(GOOD, busy={("prefill", 13003): "engine handshake of rank 0"})),
    ("online-peer-silent", replace(GOOD, reached={("prefill", 13004): SILENT})),
    ("online-peer-not-listening", replace(GOOD, reached={("prefill", 13004): REFUSED})),
    ("online-rdma-missing", replace(GOOD, config=RDMA, rdma_ports={"mlx5_0": None})),
    ("online-rdma-missing", replace(GOOD, config=RDMA, rdma_ports={"mlx5_0": None}, rdma_known=("mlx5_0",))),
    ("online-rdma-inactive", replace(GOOD, config=RDMA, rdma_ports={"mlx5_0": replace(ACTIVE, state="1: DOWN")})),
    ("online-rdma-gid", replace(GOOD, config=RDMA, rdma_ports={"mlx5_0": replace(ACTIVE, gids=())})),
    ("online-rdma-gid", replace(GOOD, config=RDMA, rdma_ports={"mlx5_0": ACTIVE}, gid_index=5)),
    ("online-api-wrong", replace(GOOD, apis={"prefill": ApiAnswer(LISTENING)}, api_ports={"prefill": 8100})),
    ("online-api-not-running", replace(GOOD, apis={"decode": ApiAnswer(REFUSED)}, api_ports={"decode": 8200})),
    (
        "online-api-models",
        replace(GOOD, apis={"prefill": ApiAnswer(LISTENING, ("a",)), "decode": ApiAnswer(LISTENING, ("b",))}),
    ),
    ("online-memlock", replace(GOOD, config=RDMA, memlock_bytes=8 << 20)),
]


@pytest.mark.parametrize(("rule", "facts"), FACTS)
def test_facts_yield_exactly_their_rule(rule: str, facts: HostFacts) -> None:
    found = {item.name for item, _ in ONLINE_RULES.run(facts)}

    assert found - {"online-name-resolved"} == {rule} - {"online-name-resolved"}
    assert rule in found


def test_every_rule_has_facts() -> None:
    assert {rule.name for rule, _ in ONLINE_RULES.items} == {rule for rule, _ in FACTS}


def test_good_facts_yield_no_error() -> None:
    addresses = replace(TCP, prefill=Endpoint("10.0.0.1", 13003), decode=Endpoint("10.0.0.2", 13003))

    assert (
        list(
            ONLINE_RULES.run(replace(GOOD, config=addresses, resolved={"10.0.0.1": "10.0.0.1", "10.0.0.2": "10.0.0.2"}))
        )
        == []
    )
