"""All checks. Importing this module registers them, in the documented order of troubleshooting: the network, firewalls,
RDMA devices, shared libraries, then what else is known to go wrong.
"""

from __future__ import annotations

from mooncake_v0.doctor import network, hardware, software, environment, metadata_state  # isort: skip  # order of checking
from mooncake_v0.doctor.report import CHECKS

__all__ = ["CHECKS", "environment", "hardware", "metadata_state", "network", "software"]
