"""What `mooncake-v0 explain` prints: one record for each name that a finding can have."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Explanation:
    """A finding's name, its usual severity, what it is about (first paragraph: in one sentence), and a heading."""

    name: str
    severity: str
    text: str
    group: str

    @property
    def summary(self) -> str:
        return self.text.split("\n\n", 1)[0].replace("\n", " ")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


GROUPS = {
    "text": "The file as text",
    "shape": "Fields of mooncake.json",
    "endpoints": "prefill_url and decode_url",
    "metadata_scheme": "The metadata server",
    "metadata": "The metadata server",
    "metadata_use": "The metadata server",
    "protocol": "protocol and device_name",
    "ports": "Ports and hosts of the pair",
    "kv_transfer": "--kv-transfer-config",
    "launch_rules": "Launch commands",
    "pair_rules": "Launch commands of a pair",
    "online_rules": "The host and the network (--online)",
}


def config_explanations() -> list[Explanation]:
    """Every rule about a configuration, in the order of checking."""
    # importing these registers their rules
    import mooncake_v0.config.compare
    import mooncake_v0.config.inputs
    import mooncake_v0.config.online_rules  # noqa: F401
    from mooncake_v0.config.rules import RULES

    return [
        Explanation(rule.name, rule.severity, rule.explanation, GROUPS.get(rule.module, "Several inputs"))
        for rule in RULES.values()
    ]
