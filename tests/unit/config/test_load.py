"""`load_config`, the plugin's way in: the model of a valid file, every finding of one that is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mooncake_v0.config.addresses import parse_metadata
from mooncake_v0.config.check import MAX_FINDINGS, check_bytes
from mooncake_v0.config.load import load_config
from mooncake_v0.config.model import Endpoint, MooncakeConfig
from mooncake_v0.errors import ConfigError, CouldNotCheckError

BASE = {"prefill_url": "10.0.0.1:13003", "decode_url": "10.0.0.2:13003", "metadata_server": "etcd://10.0.0.9:2379"}


def write(folder: Path, **fields: Any) -> Path:
    path = folder / "mooncake.json"
    path.write_text(json.dumps({**BASE, **fields}))
    return path


def test_defaults_are_tcp_and_no_devices(tmp_path: Path) -> None:
    assert load_config(write(tmp_path)) == MooncakeConfig(
        Endpoint("10.0.0.1", 13003), Endpoint("10.0.0.2", 13003), "etcd://10.0.0.9:2379", "tcp"
    )


def test_what_is_certain_is_read_as_meant(tmp_path: Path) -> None:
    fields = {"protocol": "RDMA ", "device_name": "mlx5_0, mlx5_1", "prefill_url": " 10.0.0.1:13003"}

    config = load_config(write(tmp_path, **fields, metadata_server="REDIS://10.0.0.9:6379/1"))

    assert config.device_names == ("mlx5_0", "mlx5_1")
    assert (config.protocol, config.metadata_server) == ("rdma", "redis://10.0.0.9:6379/1")


@pytest.mark.parametrize(
    ("server", "backend", "url"),
    [
        ("10.0.0.9:2379", None, "etcd://10.0.0.9:2379"),
        ("10.0.0.9:2379", "etcd", "etcd://10.0.0.9:2379"),
        ("10.0.0.9:6379", "redis", "redis://10.0.0.9:6379"),
        ("10.0.0.9:8080/metadata", "HTTP", "http://10.0.0.9:8080/metadata"),
        ("HTTP://10.0.0.9:8080/Metadata", None, "http://10.0.0.9:8080/Metadata"),
    ],
)
def test_metadata_server_is_always_a_url_with_its_scheme(
    tmp_path: Path, server: str, backend: str | None, url: str
) -> None:
    assert load_config(write(tmp_path, metadata_server=server, metadata_backend=backend)).metadata_server == url


def test_devices_of_a_tcp_pair_are_dropped(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, device_name="mlx5_0")).device_names == ()


def test_equal_urls_move_decode_by_100(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, decode_url="10.0.0.1:13003")).decode.port == 13103


def test_copies_that_mean_the_same_have_one_digest(tmp_path: Path) -> None:
    first = load_config(write(tmp_path)).digest()
    second = load_config(write(tmp_path, protocol="TCP", device_name=" ", metadata_server="10.0.0.9:2379")).digest()

    assert first == second


def test_invalid_file_raises_with_all_findings(tmp_path: Path) -> None:
    path = write(tmp_path, protocol="quic", decode_url="10.0.0.2")

    with pytest.raises(ConfigError) as caught:
        load_config(path)

    assert {item.rule for item in caught.value.diagnostics} == {"protocol-unknown", "endpoint-port-missing"}
    assert f"{path}:1: $.decode_url: decode_url has no port" in caught.value.what
    assert "mooncake-v0 validate" in caught.value.fix


def test_findings_of_one_kind_are_limited_and_counted() -> None:
    text = "{" + '"prefill_url": "10.0.0.1:13003",' * 10_001 + '"a": 1}'

    found = [item for item in check_bytes(text.encode()).diagnostics if item.rule == "duplicate-key"]

    assert len(found) == MAX_FINDINGS
    assert found[-1].what.endswith(f", and {10_000 - MAX_FINDINGS} more findings of this kind")


def test_missing_file_raises_that_it_could_not_be_checked(tmp_path: Path) -> None:
    with pytest.raises(CouldNotCheckError, match="does not exist"):
        load_config(tmp_path / "none.json")


def test_size_of_the_pair_decides_whether_close_ports_load(tmp_path: Path) -> None:
    path = write(tmp_path, decode_url="10.0.0.1:13013")

    assert load_config(path, tensor_parallel_size=4).decode.port == 13013
    with pytest.raises(ConfigError):
        load_config(path, tensor_parallel_size=8)
    with pytest.raises(ConfigError):
        load_config(path)


@pytest.mark.parametrize(
    ("url", "needs_gateway"),
    [
        ("etcd://h:2379", False),
        ("http://h:8080/metadata", False),
        ("http://u:p@h:8080/metadata", False),
        ("https://h/metadata", True),
        ("etcds://h:2379", True),
        ("etcd://u:p@h:2379", True),
        ("etcd://a:2379,b:2379", True),
        ("redis://h", True),
        ("redis+cluster://a:6379,b:6379", True),
    ],
)
def test_gateway_is_needed_for_what_the_engine_cannot_use(url: str, needs_gateway: bool) -> None:
    address = parse_metadata(url)
    assert address is not None

    assert address.needs_gateway == needs_gateway
