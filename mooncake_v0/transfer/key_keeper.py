"""Keeps an agent's keys in the metadata store: nothing in the engine does.

The engine writes its keys once. When the metadata server is restarted or somebody prunes, they are gone and new peers
cannot find the engine; when the process is killed they stay. So a thread of the agent compares them every few seconds and
writes them again when they vanish, beside the registry's record of who owns them. Orderly exits remove both.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time

from mooncake_v0.errors import EngineError, MetadataError, MooncakeV0Error
from mooncake_v0.metadata.engine_values import RAM_PREFIX, RPC_PREFIX
from mooncake_v0.metadata.gateway_process import GatewayProcess, start_gateway_process
from mooncake_v0.metadata.probes import ANSWERS, probe_all
from mooncake_v0.metadata.registry import INSTANCE_PREFIX, REFRESH_S, InstanceRecord, refresh, register, unregister
from mooncake_v0.metadata.segments import group_segments
from mooncake_v0.metadata.store import Entry, MetadataStore, open_store

logger = logging.getLogger(__name__)

CHECK_EVERY_S = 2.0
JOIN_S = 1.0
ENGINE_PREFIXES = (RAM_PREFIX, RPC_PREFIX)


class KeyKeeper:
    """One per agent. `fetch_descriptor` and `open_gateway` are called by the engine thread before `start`."""

    def __init__(self, metadata_url: str, record: InstanceRecord) -> None:
        self._url = metadata_url
        self._record = record
        self._store: MetadataStore | None = None
        self._gateway: GatewayProcess | None = None
        self._kept: dict[str, bytes] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keys", daemon=True)

    def check_name_free(self) -> None:
        """Refuse a name that another process has published and under which it answers; keys of a dead one are no obstacle.

        An engine of other software has no record of ours, only the engine's own keys.
        """
        store, name = self._open_store(), self._record.segment
        values = [(prefix + name, store.get(prefix + name)) for prefix in (*ENGINE_PREFIXES, INSTANCE_PREFIX)]
        for segment in group_segments(Entry(key, value) for key, value in values if value is not None):
            found, address = segment.record, (segment.host, segment.probe_port)
            if (found is None or found.epoch != self._record.epoch) and _answers(*address):
                who = f"process {found.pid} on {found.hostname!r}" if found else "an engine of other software"
                raise EngineError(
                    f"segment {name} belongs to {who}, which answers at {address[0]}:{address[1]}",
                    fix="stop it, or give this deployment other ports in prefill_url and decode_url",
                )

    def open_gateway(self) -> str:
        """Start the private gateway over a store that the engine cannot use itself; its URL."""
        self._gateway = start_gateway_process(self._url)
        return self._gateway.url

    def fetch_descriptor(self) -> bytes | None:
        return self._open_store().get(f"mooncake/ram/{self._record.segment}")

    def start(self) -> None:
        if not self._thread.is_alive():
            self._thread.start()

    def stop(self) -> None:
        """Stop re-publishing, so that the engine can remove its keys for good, and remove the record."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(JOIN_S)
        try:
            if self._store is not None and self._kept:
                unregister(self._store, self._record)
        except MetadataError as error:
            logger.warning("the record of %s stays in the metadata store: %s", self._record.segment, error)

    def close(self) -> None:
        """After the engine has gone."""
        if self._gateway is not None:
            self._gateway.close()
        if self._store is not None:
            self._store.close()

    def _open_store(self) -> MetadataStore:
        if self._store is None:
            self._store = open_store(self._url)
        return self._store

    def _run(self) -> None:
        problem = ""
        next_refresh_s = 0.0
        while not self._stop.is_set():
            try:
                if self._gateway is not None:
                    self._gateway.ensure_alive()
                self._check_keys()
                if time.monotonic() >= next_refresh_s:
                    self._write_record(first=not next_refresh_s)
                    next_refresh_s = time.monotonic() + REFRESH_S
                if problem:
                    logger.info("the metadata store answers again")
                problem = ""
            except MooncakeV0Error as error:
                if not problem:
                    logger.warning("metadata store: %s; transfers between connected peers go on", error)
                problem = str(error)
            self._stop.wait(CHECK_EVERY_S)

    def _check_keys(self) -> None:
        store = self._open_store()
        for prefix in ENGINE_PREFIXES:
            key = prefix + self._record.segment
            value = store.get(key)
            if value is not None:
                self._kept[key] = value
            elif key in self._kept:
                logger.warning("%s has vanished from the metadata store and is written again", key)
                store.put(key, self._kept[key])

    def _write_record(self, *, first: bool) -> None:
        store = self._open_store()
        self._record = register(store, self._record) if first else refresh(store, self._record)


def _answers(host: str | None, port: int | None) -> bool:
    if not host or not port or port > 65535:
        return False
    return probe_all([(host, port)])[(host, port)] == ANSWERS


def make_record(
    *,
    segment: str,
    role: str,
    rank: int,
    host: str,
    handshake: int,
    side_channel: int,
    protocol: str,
    epoch: str,
    deployment: str,
    api_url: str | None,
) -> InstanceRecord:
    """The registry's record of this process."""
    now_s = time.time()
    return InstanceRecord(
        segment=segment,
        role=role,
        rank=rank,
        host=host,
        handshake_port=handshake,
        data_port=handshake + 1,
        side_channel_port=side_channel,
        protocol=protocol,
        pid=os.getpid(),
        hostname=socket.gethostname(),
        epoch=epoch,
        started_at=now_s,
        refreshed_at=now_s,
        deployment=deployment,
        api_url=api_url,
    )
