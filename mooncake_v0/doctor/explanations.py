"""What `mooncake-v0 explain` prints about doctor's checks."""

from __future__ import annotations

from mooncake_v0.config.explanations import Explanation
from mooncake_v0.doctor.catalogue import CHECKS


def doctor_explanations() -> list[Explanation]:
    """Every check of doctor's own, in the order of checking."""
    return [Explanation(item.name, item.severity, item.explanation, "The host (doctor)") for item in CHECKS.values()]
