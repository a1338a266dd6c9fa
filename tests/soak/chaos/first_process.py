"""Process 1 of the soak's namespaces: mounts its own /dev/shm, runs the soak, and collects what dies without a parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from tests.soak.chaos.cable import open_tun
from tests.soak.chaos.link import DECODE_ADDRESS


def main(argv: list[str]) -> int:
    """``first_process MODULE ARGUMENT…``, or ``--try``: only see whether everything that the soak needs is allowed."""
    if os.getpid() != 1:
        print("this is the first process of namespaces that the soak makes, not a command", file=sys.stderr)
        return 2
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    if argv == ["--try"]:
        os.close(open_tun(DECODE_ADDRESS))
        return subprocess.run(["unshare", "--net", "--", "true"]).returncode
    signal.signal(signal.SIGINT, lambda *_: None)  # the soak gets it too and ends
    child = subprocess.Popen([sys.executable, "-m", *argv])
    while True:
        pid, status = os.wait()
        if pid == child.pid:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) % 256)
