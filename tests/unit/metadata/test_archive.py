from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_v0.errors import MetadataError
from mooncake_v0.metadata.archive import export_lines, read_export
from mooncake_v0.metadata.store import Entry

HEAD = '{"format": "mooncake-v0-metadata", "version": 1}'


@given(st.lists(st.tuples(st.text(min_size=1, max_size=20), st.binary(max_size=20)), max_size=5))
def test_what_is_exported_is_imported_byte_for_byte(pairs: list[tuple[str, bytes]]) -> None:
    entries = [Entry(key, value) for key, value in pairs]

    assert read_export(list(export_lines(entries)), "file") == entries


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        ([], "file"),
        (["{}"], "file"),
        (["not json"], "file:1"),
        ([HEAD, "{"], "file:2"),
        ([HEAD, "[]"], "file:2"),
        ([HEAD, '{"key": "a"}'], "file:2"),
        ([HEAD, '{"key": 1, "value": "x"}'], "file:2"),
        ([HEAD, '{"key": "a", "value_base64": "?"}'], "file:2"),
        ([HEAD, '{"key": "\\ud800", "value": "x"}'], "file:2"),
    ],
)
def test_a_damaged_file_is_refused_with_its_line(lines: list[str], place: str) -> None:
    with pytest.raises(MetadataError, match=f"^{place}"):
        read_export(lines, "file")
