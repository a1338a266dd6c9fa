"""Keys in etcd: several endpoints with failover, user and password, TLS with client certificate (etcd3's gRPC stubs).

The engine's own etcd client takes one endpoint and no password (etcd_wrapper.go, 0.3.3.post2). etcd3's client class
takes one endpoint too, does not renew an expired token, and leaves some calls without a deadline, so only its generated
stubs are used. A call starts at the endpoint that answered last and moves on when one is down or silent; all tries
together end within the store's timeout.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import grpc

from mooncake_v0.errors import MetadataError, StoreUnavailableError
from mooncake_v0.metadata.etcd_rpc import load_etcd_rpc
from mooncake_v0.metadata.queue_watch import Offer, QueueWatch
from mooncake_v0.metadata.store import DELETE, LIST_TIMEOUT_S, PUT, Change, Entry, Watch
from mooncake_v0.metadata.store_url import StoreURL

LIST_PAGE = 2000
TRY_NEXT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
LOGIN_AGAIN = (
    "invalid auth token",
    "user name is empty",
    "auth: revision in header is old",
    "revision of auth store is old",
)
GRPC_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # despite its name also the time that one attempt may take, TLS handshake included
    ("grpc.min_reconnect_backoff_ms", 3000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.keepalive_time_ms", 30000),
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True)
class Member:
    """One endpoint: its channel and stubs."""

    name: str
    channel: Any
    kv: Any
    lease: Any
    auth: Any
    watch: Any


class EtcdStore:
    """etcd v3 keys over gRPC; thread-safe."""

    def __init__(self, address: StoreURL, *, timeout_s: float) -> None:
        self.url = str(address)
        self._timeout_s = timeout_s
        self._rpc = load_etcd_rpc()
        self._user, self._password = address.user, address.password
        self._token: str | None = None
        self._lock = threading.Lock()
        credentials = _credentials(address)
        self._members = [self._member(host, port, credentials) for host, port in address.hosts]
        self._current = 0

    def get(self, key: str) -> bytes | None:
        request = self._rpc.RangeRequest(key=key.encode())
        answer = self._call(lambda member: member.kv.Range, request)
        return bytes(answer.kvs[0].value) if answer.kvs else None

    def put(self, key: str, value: bytes, *, ttl_s: float | None = None) -> None:
        lease = 0
        if ttl_s is not None:
            seconds = max(1, round(ttl_s))  # etcd counts leases in whole seconds
            lease = self._call(lambda member: member.lease.LeaseGrant, self._rpc.LeaseGrantRequest(TTL=seconds)).ID
        request = self._rpc.PutRequest(key=key.encode(), value=value, lease=lease)
        self._call(lambda member: member.kv.Put, request)

    def delete(self, key: str, *, expected: bytes | None = None) -> bool:
        delete = self._rpc.DeleteRangeRequest(key=key.encode())
        if expected is None:
            return int(self._call(lambda member: member.kv.DeleteRange, delete).deleted) > 0
        unchanged = self._rpc.Compare(
            key=key.encode(), target=self._rpc.Compare.VALUE, result=self._rpc.Compare.EQUAL, value=expected
        )
        request = self._rpc.TxnRequest(compare=[unchanged], success=[self._rpc.RequestOp(request_delete_range=delete)])
        return bool(self._call(lambda member: member.kv.Txn, request).succeeded)

    def list(self, prefix: str) -> list[Entry]:
        entries: list[Entry] = []
        start, end, revision = prefix.encode() or b"\0", _range_end(prefix.encode()), 0
        while True:
            request = self._rpc.RangeRequest(key=start, range_end=end, limit=LIST_PAGE, revision=revision)
            answer = self._call(lambda member: member.kv.Range, request, timeout_s=LIST_TIMEOUT_S)
            entries += [Entry(kv.key.decode("utf-8", "replace"), bytes(kv.value)) for kv in answer.kvs]
            if not answer.more:
                return entries
            # the first page's revision, so that the pages are one moment's picture
            revision = revision or answer.header.revision
            start = bytes(answer.kvs[-1].key) + b"\0"

    def watch(self, prefix: str) -> Watch:
        head = self._call(lambda member: member.kv.Range, self._rpc.RangeRequest(key=prefix.encode() or b"\0", limit=1))
        create = self._rpc.WatchCreateRequest(
            key=prefix.encode() or b"\0",
            range_end=_range_end(prefix.encode()),
            start_revision=head.header.revision + 1,
        )
        requests: queue.Queue[Any] = queue.Queue()
        requests.put(self._rpc.WatchRequest(create_request=create))
        stub = self._members[self._current].watch
        call = stub.Watch(iter(requests.get, None), metadata=self.auth_metadata())

        def stop() -> None:
            requests.put(None)  # ends gRPC's thread that waits for our next request
            call.cancel()

        return QueueWatch(self.url, lambda offer: _read_changes(call, offer), stop)

    def close(self) -> None:
        for member in self._members:
            member.channel.close()

    def auth_metadata(self) -> tuple[tuple[str, str], ...]:
        """gRPC metadata with the current token; empty without a login."""
        token = self._token
        return () if token is None else (("token", token),)

    def _member(self, host: str, port: int, credentials: Any) -> Member:
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        channel = (
            grpc.secure_channel(target, credentials, GRPC_OPTIONS)
            if credentials is not None
            else grpc.insecure_channel(target, GRPC_OPTIONS)
        )
        rpc = self._rpc
        return Member(
            target, channel, rpc.KVStub(channel), rpc.LeaseStub(channel), rpc.AuthStub(channel), rpc.WatchStub(channel)
        )

    def _call(self, method: Callable[[Member], Any], request: Any, *, timeout_s: float | None = None) -> Any:
        """One RPC at the first member that answers; the members share the deadline."""
        total_s = timeout_s or self._timeout_s
        started = time.monotonic()
        deadline = started + total_s
        each_s = total_s / len(self._members)
        failure: Any = None
        while True:
            for offset in range(len(self._members)):
                index = (self._current + offset) % len(self._members)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise self._unavailable(failure, total_s)
                try:
                    answer = self._authorised(self._members[index], method, request, min(each_s, left_s))
                except grpc.RpcError as error:
                    failure = error
                    if error.code() not in TRY_NEXT:
                        raise self._refused(error) from error
                    continue
                self._current = index
                return answer
            # refused at once everywhere: etcd may be restarting or electing; try again while there is time for it
            if time.monotonic() - started > self._timeout_s - 0.2:
                raise self._unavailable(failure, total_s) from failure
            time.sleep(0.05)

    def _authorised(self, member: Member, method: Callable[[Member], Any], request: Any, timeout_s: float) -> Any:
        if self._user is None:
            return method(member)(request, timeout=timeout_s)
        if self._token is None:
            self._log_in(member, timeout_s)
        try:
            return method(member)(request, timeout=timeout_s, metadata=self.auth_metadata())
        except grpc.RpcError as error:
            if not any(text in (error.details() or "") for text in LOGIN_AGAIN):
                raise
        # a simple token lives 5 minutes by default and dies with its member
        self._log_in(member, timeout_s)
        return method(member)(request, timeout=timeout_s, metadata=self.auth_metadata())

    def _log_in(self, member: Member, timeout_s: float) -> None:
        request = self._rpc.AuthenticateRequest(name=self._user, password=self._password or "")
        with self._lock:
            self._token = member.auth.Authenticate(request, timeout=timeout_s).token

    def _unavailable(self, failure: Any, total_s: float) -> StoreUnavailableError:
        details = failure.details() if failure is not None else "no answer"
        return StoreUnavailableError(
            f"{self.url} did not answer within {total_s:g} s: {details}",
            fix="check that a majority of the etcd members runs and is reachable, and TLS settings",
        )

    def _refused(self, error: Any) -> MetadataError:
        return MetadataError(
            f"{self.url} refused the request: {error.details()}",
            fix="check user, password, permissions on mooncake/ and mooncake-v0/, and the value's size",
        )


def _read_changes(call: Any, offer: Offer) -> str:
    try:
        for answer in call:
            for event in answer.events:
                offer(_change(event))
            if answer.canceled:
                return answer.cancel_reason or "cancelled by the server"
    except grpc.RpcError as error:
        return str(error.details()) if isinstance(error, grpc.Call) else str(error)
    return "the stream ended"


def _change(event: Any) -> Change:
    key = event.kv.key.decode("utf-8", "replace")
    return Change(DELETE, key, None) if event.type == 1 else Change(PUT, key, bytes(event.kv.value))


def _range_end(prefix: bytes) -> bytes:
    """The first key after all keys with this prefix; a lone zero byte means "to the end" in etcd."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else b"\0"


def _credentials(address: StoreURL) -> Any:
    if not address.is_tls:
        return None
    try:
        ca, cert, key = (None if p is None else Path(p).read_bytes() for p in (address.ca, address.cert, address.key))
    except OSError as error:
        raise MetadataError(
            f"TLS file {error.filename!r} could not be read: {error.strerror}",
            fix="check ca=, cert= and key= in the URL",
        ) from error
    return grpc.ssl_channel_credentials(ca, key, cert)
