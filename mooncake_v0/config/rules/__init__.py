"""All rules about one mooncake.json. Importing this package registers them in the order of checking."""

from __future__ import annotations

from mooncake_v0.config.rules import text, shape, endpoints, metadata_scheme, metadata, metadata_use, protocol, ports  # isort: skip  # order of checking
from mooncake_v0.config.rules.registry import RULES, CheckOptions, Edit, Finding, Rule, Subject

__all__ = [
    "RULES",
    "CheckOptions",
    "Edit",
    "Finding",
    "Rule",
    "Subject",
    "endpoints",
    "metadata",
    "metadata_scheme",
    "metadata_use",
    "ports",
    "protocol",
    "shape",
    "text",
]
