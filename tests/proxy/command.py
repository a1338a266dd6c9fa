"""The command `mooncake-v0 proxy` as a process of its own, for tests and measurements."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from dataclasses import dataclass, field
from typing import AsyncIterator, Sequence


@dataclass
class Command:
    """A running proxy. url and admin_url as it announced them; stderr is everything that it has said so far."""

    process: asyncio.subprocess.Process
    url: str = ""
    admin_url: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def stderr(self) -> str:
        return "".join(self.lines)

    async def listen(self) -> None:
        """Read what it says until it listens, or ends."""
        assert self.process.stderr is not None
        while not self.url:
            line = (await asyncio.wait_for(self.process.stderr.readline(), 30)).decode()
            if not line:
                return
            self.lines.append(line)
            found = re.search(r"listening on (\S+?)(?:, admin on (\S+))?$", line.strip())
            if found:
                self.url, self.admin_url = found[1], found[2] or ""

    async def rest(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode())

    async def end(self, within_s: float = 20) -> int:
        return await asyncio.wait_for(self.process.wait(), within_s)


async def start_command(arguments: Sequence[str], *, pass_fds: Sequence[int] = (), python: str = "") -> Command:
    """Start it; returns when it listens or has ended."""
    process = await asyncio.create_subprocess_exec(
        python or sys.executable,
        "-m",
        "mooncake_v0",
        "proxy",
        *arguments,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        pass_fds=pass_fds,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"},
    )
    command = Command(process)
    await command.listen()
    return command


@contextlib.asynccontextmanager
async def running_command(*arguments: str, pass_fds: Sequence[int] = ()) -> AsyncIterator[Command]:
    """A proxy for the length of a block; killed at its end if it still runs."""
    command = await start_command(arguments, pass_fds=pass_fds)
    reading = asyncio.ensure_future(command.rest())
    try:
        yield command
    finally:
        if command.process.returncode is None:
            command.process.kill()
        await command.process.wait()
        await reading
