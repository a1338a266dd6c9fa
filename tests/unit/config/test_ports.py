"""`mooncake-v0 ports`: the table is the port plan, and the firewall rules open exactly what decode connects to."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mooncake_v0.cli.ports import ports
from mooncake_v0.config.model import Endpoint, MooncakeConfig, rank_ports
from mooncake_v0.config.port_table import openings, peer_ports, port_table, ranges

TCP = MooncakeConfig(Endpoint("10.0.0.1", 13003), Endpoint("10.0.0.2", 13003), "etcd://10.0.0.2:2379", "tcp")
RDMA = MooncakeConfig(
    Endpoint("10.0.0.1", 13003), Endpoint("10.0.0.2", 13003), "etcd://10.0.0.2:2379", "rdma", ("mlx5_0",)
)


def run(folder: Path, *arguments: str, **fields: Any) -> Result:
    path = folder / "mooncake.json"
    base = {"prefill_url": "10.0.0.1:13003", "decode_url": "10.0.0.2:13003", "metadata_server": "etcd://10.0.0.3:2379"}
    path.write_text(json.dumps({**base, **fields}))
    return CliRunner().invoke(ports, [str(path), *arguments], standalone_mode=False)


@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_table_holds_every_port_of_the_plan_once(ranks: int) -> None:
    table = port_table(TCP, ranks, {})

    listed = sorted((row.side, row.port) for row in table if row.rank is not None)
    planned = [
        (side, port)
        for side in ("prefill", "decode")
        for rank in range(ranks)
        for port in [
            getattr(rank_ports(Endpoint("h", 13003), rank), name) for name in ("handshake", "data", "side_channel")
        ]
    ]
    assert listed == sorted(planned)
    assert len(set(listed)) == 6 * ranks


@pytest.mark.parametrize(
    ("config", "expected"), [(TCP, [13004, 13035, 13006, 13036]), (RDMA, [13003, 13035, 13005, 13036])]
)
def test_decode_connects_to_data_with_tcp_and_to_the_handshake_with_rdma(
    config: MooncakeConfig, expected: list[int]
) -> None:
    assert peer_ports(config, 2) == expected


def test_every_port_that_decode_connects_to_is_in_the_firewall_rules() -> None:
    (opening,) = openings(TCP, 4)

    opened = {port for first, last in opening.runs for port in range(first, last + 1)}
    assert set(peer_ports(TCP, 4)) <= opened
    assert (opening.host, opening.source) == ("10.0.0.1", "10.0.0.2")
    assert len(opening.runs) == 2


@pytest.mark.parametrize(
    ("numbers", "runs"), [([], []), ([1], [(1, 1)]), ([3, 1, 2, 2], [(1, 3)]), ([1, 2, 5], [(1, 2), (5, 5)])]
)
def test_neighbours_become_one_range(numbers: list[int], runs: list[tuple[int, int]]) -> None:
    assert ranges(numbers) == runs


def test_rules_of_each_firewall_are_ready_to_paste(tmp_path: Path) -> None:
    assert run(tmp_path, "--tp", "2", "--firewall", "ufw").output.splitlines() == [
        "ufw allow from 10.0.0.2 to any port 13004:13006 proto tcp",
        "ufw allow from 10.0.0.2 to any port 13035:13036 proto tcp",
    ]
    assert run(tmp_path, "--firewall", "iptables").output.splitlines() == [
        "iptables -A INPUT -p tcp -s 10.0.0.2 --dport 13004 -j ACCEPT",
        "iptables -A INPUT -p tcp -s 10.0.0.2 --dport 13035 -j ACCEPT",
    ]
    assert run(tmp_path, "--tp", "2", "--firewall", "firewalld").output.splitlines() == [
        'firewall-cmd --permanent --add-rich-rule=\'rule family="ipv4" source address="10.0.0.2" '
        'port port="13004-13006" protocol="tcp" accept\'',
        'firewall-cmd --permanent --add-rich-rule=\'rule family="ipv4" source address="10.0.0.2" '
        'port port="13035-13036" protocol="tcp" accept\'',
        "firewall-cmd --reload",
    ]


def test_printed_rules_are_valid_shell(tmp_path: Path) -> None:
    for_shell = "\n".join(
        run(tmp_path, "--tp", "4", "--firewall", name).output for name in ("firewalld", "ufw", "iptables")
    )

    assert subprocess.run(["sh", "-n"], input=for_shell, text=True, timeout=30).returncode == 0


def test_text_names_every_port_and_who_connects(tmp_path: Path) -> None:
    output = run(tmp_path, "--tp", "2", "--prefill-api-port", "8100").output

    assert "prefill   10.0.0.1  1     13036  side channel      tcp       decode\n" in output
    assert "prefill   10.0.0.1  -     8100   vLLM API          http      proxy\n" in output
    assert "metadata  10.0.0.3  -     2379   metadata server   etcd      both\n" in output


def test_one_machine_needs_no_firewall_rule(tmp_path: Path) -> None:
    result = run(tmp_path, decode_url="10.0.0.1:13103")

    assert result.return_value == 0
    assert "its firewall needs no rule" in result.output
    assert run(tmp_path, "--firewall", "ufw", decode_url="10.0.0.1:13103").output.startswith("# ")


def test_equal_urls_show_the_port_that_decode_really_uses(tmp_path: Path) -> None:
    report = json.loads(run(tmp_path, "--format", "json", decode_url="10.0.0.1:13003").output)

    assert [row["port"] for row in report["ports"] if row["side"] == "decode"] == [13103, 13104, 13135]
    assert report["firewall"] == {"firewalld": [], "ufw": [], "iptables": []}


def test_name_is_left_for_the_reader_to_replace(tmp_path: Path) -> None:
    assert "from ADDRESS-OF-decode-0 to" in run(tmp_path, "--firewall", "ufw", decode_url="decode-0:13003").output
