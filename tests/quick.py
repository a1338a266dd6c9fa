"""How instances start where the start itself is not what is tested: the same vLLM, which imports itself less often.

By default a start on the CPU imports all of vLLM four times, 30 seconds of CPU: the API server, the engine, and for each of
them a Python that looks at the model's class. The demo is tested as it is; `launch` and the documented commands have only
their environment from here, not a flag.
"""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).parent
# The engine in the API server's process; a CPU worker has a process of its own either way.
IN_ONE_PROCESS = ("--disable-frontend-multiprocessing",)


def python_path(*folders: str) -> str:
    """PYTHONPATH with these folders of tests/ before what it has."""
    return ":".join(filter(None, (*(str(TESTS / folder) for folder in folders), os.environ.get("PYTHONPATH"))))


QUICK_START = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONPATH": python_path("quick_start"),
}
