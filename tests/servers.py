"""Real etcd, redis and wheel metadata servers on free loopback ports, for the tests of every part.

Each `start_*` returns a `Server` that answers already; the caller stops it. Binaries are Debian's (scripts/apt-packages.txt).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterator, Sequence

from tests.freezing import freeze, thaw

START_TIMEOUT_S = 20.0
PASSWORD = "s3cret/pw@x"
SENTINEL_PASSWORD = "an0ther/pw@y"
PASSWORD_IN_URL = "s3cret%2Fpw%40x"


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
    """Poll until the condition is true; fail with its name when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s:g} s"
        time.sleep(0.02)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def far_away(port: int, delay_s: float) -> Iterator[int]:
    """A local port that leads to this one, each way `delay_s` longer."""
    ends: list[socket.socket] = []

    def carry(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(65536):
                time.sleep(delay_s)
                target.sendall(chunk)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                pair = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
                ends.extend(pair)
                for source, target in (pair, pair[::-1]):
                    threading.Thread(target=carry, args=(source, target), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield listener.getsockname()[1]
        finally:
            for end in (listener, *ends):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()


@dataclass
class Server:
    """A child process that listens; `url` is its store URL, where it has one."""

    command: list[str]
    port: int
    url: str
    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> Server:
        with (self.folder / f"server-{self.port}.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, cwd=self.folder, env={**os.environ, **self.env}
            )
        wait_until(lambda: self.has_ended or answers(self.port), f"{self.command[0]} on port {self.port}")
        assert not self.has_ended, (self.folder / f"server-{self.port}.log").read_text()[-2000:]
        return self

    @property
    def has_ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def pause(self) -> None:
        assert self.process is not None
        freeze(self.process.pid)

    def resume(self) -> None:
        assert self.process is not None
        thaw(self.process.pid)

    def stop(self) -> None:
        if self.has_ended:
            return
        assert self.process is not None
        self.resume()
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()


@dataclass(frozen=True)
class Certificates:
    """Files of a test CA, a server certificate for 127.0.0.1 and localhost, and a client certificate."""

    ca: Path
    cert: Path
    key: Path
    client_cert: Path
    client_key: Path


def make_certificates(folder: Path) -> Certificates:
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=30)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test ca", "-days", "2")
    for name in ("server", "client"):
        (folder / f"{name}.ext").write_text(
            "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n"
        )
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", "2", "-extfile", f"{name}.ext", "-out", f"{name}.pem"),
        )
    names = ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")
    return Certificates(*(folder / name for name in names))


def start_redis(folder: Path, *extra: str, port: int | None = None) -> Server:
    port = free_ports(1)[0] if port is None else port
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder), *extra]
    return Server(command, port, f"redis://127.0.0.1:{port}", folder).start()


def start_redis_acl_tls(folder: Path, certificates: Certificates) -> Server:
    """Only TLS, only the user `mooncake`, who may use just what the store needs."""
    port = free_ports(1)[0]
    acl = folder / "users.acl"
    acl.write_text(
        "user default off\n"
        f"user mooncake on >{PASSWORD} ~mooncake* resetchannels -@all +get +set +del +scan +mget +ping +eval\n"
    )
    c = certificates
    server = start_redis(
        folder,
        *("--tls-port", str(port), "--tls-cert-file", str(c.cert), "--tls-key-file", str(c.key)),
        *("--tls-ca-cert-file", str(c.ca), "--aclfile", str(acl), "--port", "0"),
        port=port,
    )
    server.url = (
        f"rediss://mooncake:{PASSWORD_IN_URL}@127.0.0.1:{port}/0?ca={c.ca}&cert={c.client_cert}&key={c.client_key}"
    )
    return server


def start_redis_sentinel(folder: Path, replicas: int = 0) -> list[Server]:
    """A redis, its replicas, and a sentinel that watches it as service `meta`; the sentinel comes last."""
    redis = start_redis(folder)
    copies = [start_redis(folder, "--replicaof", "127.0.0.1", str(redis.port)) for _ in range(replicas)]
    for copy in copies:
        # sentinel asks its master for replicas when it starts, and then only every 10 s
        wait_until(lambda: b"connected_slaves:%d" % replicas in _redis_info(redis), f"the replica on {copy.port}")
    port = free_ports(1)[0]
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\nsentinel monitor meta 127.0.0.1 {redis.port} 1\n"
        "sentinel down-after-milliseconds meta 500\nsentinel failover-timeout meta 2000\n"
    )
    command = ["redis-server", str(config), "--sentinel"]
    return [redis, *copies, Server(command, port, f"redis+sentinel://127.0.0.1:{port}/meta/0", folder).start()]


def start_redis_sentinel_logins(folder: Path) -> list[Server]:
    """A redis with PASSWORD, and a sentinel that lets in only the user `watcher` with SENTINEL_PASSWORD."""
    redis = start_redis(folder, "--requirepass", PASSWORD)
    (port,) = free_ports(1)
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\nsentinel monitor meta 127.0.0.1 {redis.port} 1\n"
        f"sentinel auth-pass meta {PASSWORD}\nuser default off\n"
        f"user watcher on >{SENTINEL_PASSWORD} allchannels -@all +auth +hello +client +command +ping +sentinel\n"
    )
    (folder / "sentinel-password").write_text(SENTINEL_PASSWORD + "\n")
    url = (
        f"redis+sentinel://:{PASSWORD_IN_URL}@127.0.0.1:{port}/meta/0"
        f"?sentinel_user=watcher&sentinel_password_file={folder}/sentinel-password"
    )
    return [redis, Server(["redis-server", str(config), "--sentinel"], port, url, folder).start()]


def _redis_info(server: Server) -> bytes:
    return subprocess.run(["redis-cli", "-p", str(server.port), "info"], capture_output=True, timeout=10).stdout


def start_redis_cluster(folder: Path) -> list[Server]:
    """Three masters with a third of the slots each."""
    members = []
    for number, port in enumerate(free_ports(3)):
        options = ("--cluster-enabled", "yes", "--cluster-config-file", f"nodes-{number}.conf")
        # the default bus port, port + 10000, may lie above 65535
        members.append(start_redis(folder, *options, "--cluster-port", str(free_ports(1)[0]), port=port))

    def cli(server: Server, *words: str) -> str:
        command = ["redis-cli", "-p", str(server.port), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout

    for server, (low, high) in zip(members, ((0, 5460), (5461, 10922), (10923, 16383))):
        cli(server, "cluster", "addslotsrange", str(low), str(high))
    for server in members[1:]:
        bus_port = server.command[server.command.index("--cluster-port") + 1]
        cli(members[0], "cluster", "meet", "127.0.0.1", str(server.port), bus_port)
    is_formed = "cluster_state:ok"
    wait_until(lambda: all(is_formed in cli(s, "cluster", "info") for s in members), "the redis cluster")
    hosts = ",".join(f"127.0.0.1:{server.port}" for server in members)
    members[-1].url = f"redis+cluster://{hosts}"
    return members


def start_etcd(folder: Path) -> Server:
    return start_etcd_cluster(folder, 1)[0]


def start_etcd_cluster(folder: Path, count: int) -> list[Server]:
    """etcd members that form one cluster; each one's url names all of them."""
    ports = free_ports(2 * count)
    clients, peers = ports[:count], ports[count:]
    cluster = ",".join(f"m{i}=http://127.0.0.1:{port}" for i, port in enumerate(peers))
    url = "etcd://" + ",".join(f"127.0.0.1:{port}" for port in clients)
    servers = [
        Server(
            [
                *("etcd", "--name", f"m{i}", "--data-dir", str(folder / f"m{i}")),
                *("--listen-client-urls", f"http://127.0.0.1:{clients[i]}"),
                *("--advertise-client-urls", f"http://127.0.0.1:{clients[i]}"),
                *("--listen-peer-urls", f"http://127.0.0.1:{peers[i]}"),
                *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peers[i]}", "--initial-cluster", cluster),
                *("--heartbeat-interval", "50", "--election-timeout", "500", "--unsafe-no-fsync"),
            ],
            clients[i],
            url,
            folder,
        )
        for i in range(count)
    ]
    if count == 1:
        servers[0].start()
    else:
        _start_together(servers)
    wait_until(lambda: _etcdctl(servers[0].port, "endpoint", "health").returncode == 0, "etcd's election")
    return servers


def _start_together(servers: Sequence[Server]) -> None:
    # a member of a new cluster answers its clients only once a majority is there
    for server in servers:
        with (server.folder / f"server-{server.port}.log").open("ab") as log:
            server.process = subprocess.Popen(server.command, stdout=log, stderr=log, cwd=server.folder)
    for server in servers:
        wait_until(lambda port=server.port: answers(port), f"etcd on port {server.port}")


def start_etcd_auth_tls(folder: Path, certificates: Certificates) -> Server:
    """TLS with client certificates, and only the user `mooncake`, who may use just our two prefixes."""
    client, peer = free_ports(2)
    c = certificates
    command = [
        *("etcd", "--data-dir", str(folder / "data"), "--unsafe-no-fsync"),
        *("--listen-client-urls", f"https://127.0.0.1:{client}"),
        *("--advertise-client-urls", f"https://127.0.0.1:{client}"),
        *("--listen-peer-urls", f"http://127.0.0.1:{peer}"),
        *("--cert-file", str(c.cert), "--key-file", str(c.key), "--trusted-ca-file", str(c.ca), "--client-cert-auth"),
    ]
    url = f"etcds://mooncake:{PASSWORD_IN_URL}@127.0.0.1:{client}?ca={c.ca}&cert={c.client_cert}&key={c.client_key}"
    server = Server(command, client, url, folder).start()
    tls = ("--cacert", str(c.ca), "--cert", str(c.client_cert), "--key", str(c.client_key))

    def etcdctl(*words: str) -> None:
        done = _etcdctl(client, *words, options=tls, scheme="https")
        assert done.returncode == 0, done.stderr

    etcdctl("user", "add", f"root:{PASSWORD}")
    etcdctl("user", "add", f"mooncake:{PASSWORD}")
    etcdctl("role", "add", "mooncake")
    etcdctl("role", "grant-permission", "mooncake", "--prefix=true", "readwrite", "mooncake")
    etcdctl("user", "grant-role", "mooncake", "mooncake")
    etcdctl("user", "grant-role", "root", "root")
    etcdctl("auth", "enable")
    return server


def _etcdctl(
    port: int, *words: str, options: Sequence[str] = (), scheme: str = "http"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["etcdctl", "--endpoints", f"{scheme}://127.0.0.1:{port}", *options, *words],
        env={**os.environ, "ETCDCTL_API": "3"},
        capture_output=True,
        text=True,
        timeout=15,
    )


def start_wheel_server(folder: Path) -> Server:
    """The http metadata server that comes in the engine's wheel."""
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "mooncake.http_metadata_server", "--host", "127.0.0.1", "--port", str(port)]
    return Server(command, port, f"http://127.0.0.1:{port}/metadata", folder).start()
