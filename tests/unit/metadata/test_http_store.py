"""A server that answers 200 and is no metadata service of ours."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Iterator

import pytest

from mooncake_v0.errors import MetadataError
from mooncake_v0.metadata.store import Entry, MetadataStore, open_store


class Says(BaseHTTPRequestHandler):
    """Answers every GET with `body`."""

    body = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def store() -> Iterator[MetadataStore]:
    with HTTPServer(("127.0.0.1", 0), Says) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        opened = open_store(f"http://127.0.0.1:{server.server_port}/metadata")
        yield opened
        opened.close()
        server.shutdown()


@pytest.mark.parametrize(
    "body",
    [
        b"<html>welcome</html>",
        b"[]",
        b"{}",
        b'{"entries": 1}',
        b'{"entries": [{"value": "a"}]}',
        b'{"entries": [{"key": 1}]}',
        b'{"entries": [{"key": "a", "value_base64": "?"}]}',
        b'{"entries": [{"key": "\xff"}]}',
    ],
)
def test_an_answer_that_is_no_list_is_one_clear_error(
    store: MetadataStore, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Says, "body", body)

    with pytest.raises(MetadataError, match=r"/metadata answered something else than a list of keys"):
        store.list("mooncake/")


def test_values_are_text_or_base64_or_empty(store: MetadataStore, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        b'{"key": "a", "value": "\\u00e9"}, {"key": "b", "value_base64": "/w=="}, {"key": "c"}, {"key": "d", "new": 1}'
    )
    monkeypatch.setattr(Says, "body", b'{"entries": [%s]}' % rows)

    assert store.list("") == [Entry("a", "é".encode()), Entry("b", b"\xff"), Entry("c", b""), Entry("d", b"")]
