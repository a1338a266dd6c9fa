"""What `mooncake-v0 explain` prints about the rows of facts: findings of the migration report by their own name, flags,
variables, keys and metrics as `v1:NAME`.
"""

from __future__ import annotations

from mooncake_v0.config.explanations import Explanation
from mooncake_v0.errors import ERROR, INFO, WARNING
from mooncake_v0.migrate.facts import Fact, table

_SEVERITIES = {"blocker": ERROR, "change": WARNING, "silent": WARNING}
_GROUPS = {
    "blockers": "Moving to V1: blockers",
    "behaviours": "Moving to V1: what changes",
    "advisories": "Moving to V1: security faults of today",
    "flags": "Moving to V1: flags",
    "envs": "Moving to V1: variables",
    "kv_config": "Moving to V1: keys of --kv-transfer-config",
    "capabilities": "Moving to V1: what the connector can",
    "metrics": "Moving to V1: metrics",
}
_NAMED = frozenset(["blockers", "behaviours", "advisories"])


def migration_explanations() -> list[Explanation]:
    """One for every row that a report can speak about."""
    return [_explanation(fact, group) for name, group in _GROUPS.items() for fact in table(name)]


def _explanation(fact: Fact, group: str) -> Explanation:
    # the entry point's row is named like its command, with spaces
    name = fact.name if fact.table in _NAMED else f"v1:{fact.name.replace(' ', '_')}"
    severity = WARNING if fact.table == "advisories" else _SEVERITIES.get(fact.severity, INFO)
    details = [_sentence(fact.text), _sentence(fact.fix, "Fix: "), _range(fact), f"Source: {fact.source}."]
    return Explanation(name, severity, "\n\n".join([_summary(fact), *filter(None, details)]), group)


def _summary(fact: Fact) -> str:
    if fact.table == "capabilities":
        return f"The V1 connector has {fact.name.replace('_', ' ')} from {fact.since} on."
    if fact.table in _NAMED:
        rated = f", rated {fact.severity}" if fact.table == "advisories" else ""
        return f"On the way to V1: {fact.title}{rated}."
    new = f"; in its place: {fact.replacement}" if fact.replacement not in ("", fact.name) else ""
    return f"{fact.name} of V0 in vLLM V1: {fact.status.replace('_', ' ')}{new}."


def _sentence(text: str, before: str = "") -> str:
    return f"{before}{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""


def _range(fact: Fact) -> str:
    parts = [f"from {fact.since}" if fact.since else "", f"until {fact.until}" if fact.until else ""]
    parts.append(f"fixed in {fact.fixed}" if fact.fixed else "")
    text = ", ".join(filter(None, parts))
    return f"Versions: {text}." if text else ""
