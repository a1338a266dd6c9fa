from __future__ import annotations

import json
from typing import Any

import pytest

from mooncake_v0.errors import UnsupportedError
from mooncake_v0.vllm_plugin.kv_transfer_config import parse_kv_transfer_config

PRODUCER: dict[str, Any] = {
    "kv_connector": "MooncakeConnector",
    "kv_role": "kv_producer",
    "kv_rank": 0,
    "kv_parallel_size": 2,
    "kv_buffer_size": 2e9,
}


def test_the_documented_value_is_taken() -> None:
    config = parse_kv_transfer_config(json.dumps(PRODUCER))

    assert config.is_producer
    assert config.role == "prefill"
    assert config.kv_buffer_size == 2e9
    assert config.kv_ip == "127.0.0.1" and config.kv_port == 14579


@pytest.mark.parametrize("size", [2e9, 2_000_000_000, "2e9", "2000000000", "2GB", "2 gb", "2000MB"])
def test_buffer_sizes_in_every_form(size: object) -> None:
    assert parse_kv_transfer_config({**PRODUCER, "kv_buffer_size": size}).kv_buffer_size == 2e9


@pytest.mark.parametrize(
    ("change", "what", "fix"),
    [
        ({"kv_connector": "PyNcclConnector"}, "kv_connector is 'PyNcclConnector'", "MooncakeConnector"),
        ({"kv_role": "kv_both"}, "kv_both", "kv_producer on prefill"),
        ({"kv_role": None}, "kv_role is None", "kv_producer on prefill"),
        ({"kv_rank": 1}, "kv_rank is 1 with kv_role 'kv_producer'", '"kv_rank":0'),
        ({"kv_role": "kv_consumer"}, "kv_rank is 0 with kv_role 'kv_consumer'", '"kv_rank":1'),
        ({"kv_rank": "0"}, "kv_rank is '0'", "without quotes"),
        ({"kv_parallel_size": 3}, "kv_parallel_size is 3", "write 2"),
        ({"kv_buffer_size": 0}, "kv_buffer_size is 0", "above 0"),
        ({"kv_buffer_size": "-1"}, "kv_buffer_size is '-1'", "above 0"),
        ({"kv_buffer_size": "nan"}, "kv_buffer_size is 'nan'", "above 0"),
        ({"kv_buffer_size": True}, "kv_buffer_size is True", "above 0"),
        ({"kv_buffer_device": "gpu"}, "kv_buffer_device is 'gpu'", '"cuda" or "cpu"'),
        ({"kv_rol": "kv_producer"}, "no field 'kv_rol'", "write 'kv_role'"),
        ({"nonsense": 1}, "no field 'nonsense'", "known are"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_mistakes_are_refused_with_what_and_fix(change: dict[str, Any], what: str, fix: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        parse_kv_transfer_config({**PRODUCER, **change})

    assert what in caught.value.what
    assert fix in caught.value.fix


@pytest.mark.parametrize("text", ["", "{", "{kv_role: kv_producer}", "[]", '"x"', "null"])
def test_text_that_is_not_an_object_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        parse_kv_transfer_config(text)

    assert "MooncakeConnector" in caught.value.fix
