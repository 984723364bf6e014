"""Real processes for end-to-end tests: `schedtop serve` with its gateway, and the command line. No fixtures in here."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schedtop.control.client import Client
from schedtop.control.messages import GetSnapshot, SnapshotReply, SnapshotUpdate, Subscribe
from schedtop.engine.snapshot import Snapshot

SCHEDTOP = [sys.executable, "-P", "-m", "schedtop"]


class Home:
    """Folders of one operator, and the command line run by them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SCHEDTOP_")},
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "PYTHONUNBUFFERED": "1",
            "LC_ALL": "C.UTF-8",
        }
        (folder / "run").mkdir(mode=0o700)

    def schedtop(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end."""
        command = [*SCHEDTOP, *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120, check=False)

    def json(self, *arguments: str) -> Any:
        """What a command that must succeed prints as JSON."""
        run = self.schedtop(*arguments)
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)

    def start(self, *arguments: str, log: str) -> "subprocess.Popen[str]":
        """Start a command whose standard output is read by the test."""
        with (self.folder / log).open("w") as errors:
            return subprocess.Popen(
                [*SCHEDTOP, *arguments], env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=errors, text=True, process_group=0,
            )  # fmt: skip


class Served:
    """`schedtop serve` and what it said at start."""

    def __init__(self, home: Home, *options: str) -> None:
        self.home = home
        self.process = home.start("serve", "--port", "0", *options, log="serve.log")
        self.socket = home.folder / "run" / "schedtop" / "schedtop.sock"
        self.url = self.next_line_with("gateway on ").split()[-1]

    def next_line_with(self, words: str) -> str:
        """Read its output up to a line that contains `words`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if words in line:
                return line.strip()
        raise AssertionError(f"serve ended without saying {words!r}: {(self.home.folder / 'serve.log').read_text()}")

    def ask(self, command: Any) -> Any:
        """Send one command over the socket."""

        async def run() -> Any:
            async with await Client.connect(str(self.socket), name="test") as client:
                return await client.request(command)

        return asyncio.run(run())

    def snapshot(self) -> Snapshot:
        """The engine now."""
        reply = self.ask(GetSnapshot())
        assert isinstance(reply, SnapshotReply)
        return reply.update.snapshot

    def wait_for(self, condition: Callable[[Snapshot], bool]) -> Snapshot:
        """The first published snapshot of which `condition` is true; the test's time limit ends a vain wait."""

        async def run() -> Snapshot:
            async with await Client.connect(str(self.socket), name="test") as client:
                await client.request(Subscribe(interval_s=0.05))
                async for message in client.messages():
                    if isinstance(message, SnapshotUpdate) and condition(message.snapshot):
                        return message.snapshot
            raise AssertionError("the engine went away")

        return asyncio.run(run())

    def assert_nothing_lost(self) -> None:
        """Idle again, every block accounted for."""
        pool = self.wait_for(lambda snapshot: snapshot.num_running + snapshot.num_waiting == 0).pool
        assert (pool.in_use, pool.free) == (0, pool.usable)
        assert self.home.schedtop("self-check").returncode == 0

    def stop(self) -> int:
        """End it as an operator would."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            self.process.send_signal(signal.SIGINT)
        assert self.process.stdout is not None
        with self.process.stdout:
            return self.process.wait(30)
