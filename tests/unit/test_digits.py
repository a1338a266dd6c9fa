"""Numbers in text: what is one, and what int() would take or choke on."""

from __future__ import annotations

import pytest

from mooncake_v0.digits import number, port_number


@pytest.mark.parametrize("text, expected", [("0", 0), ("007", 7), ("65535", 65535), ("999999999", 999999999)])
def test_digits_are_a_number(text: str, expected: int) -> None:
    assert number(text) == expected


@pytest.mark.parametrize("text", [None, "", "-1", "+1", " 1", "1_0", "1.0", "0x1", "²", "٣", "1" * 10, "1" * 5000])
def test_all_else_is_none(text: str | None) -> None:
    assert number(text) is None and port_number(text) is None


@pytest.mark.parametrize(
    "text, expected", [("1", 1), ("65535", 65535), ("00080", 80), ("000080", None), ("0", None), ("65536", None)]
)
def test_ports(text: str, expected: int | None) -> None:
    assert port_number(text) == expected
