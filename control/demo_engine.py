"""The demo's engine: `schedtop serve` as a process of its own, with a small KV pool, tied to the life of the demo.

It starts and ends that process and knows where its output goes; what is served and what is asked of it is elsewhere.
"""

import os
import socket
import subprocess
import sys
import time
from types import TracebackType
from typing import Self

from schedtop.control.discovery import is_live, socket_path, state_folder
from schedtop.engine.errors import ConfigError

NAME = "demo"
START_LIMIT_S = 180.0
"""How long loading a model may take."""
POLL_S = 0.1
END_S = 20.0
NUM_LINES_SHOWN = 15


class DemoEngine:
    """A served engine; use it as a context manager. Raises `ConfigError` with its last words if it can't start."""

    def __init__(self, *options: str, port: int) -> None:
        """`options` as for `schedtop serve`."""
        self.socket = socket_path(NAME)
        self.log = state_folder() / f"{NAME}.log"
        arguments = ["serve", "--name", NAME, "--port", str(_free_port(port)), "--drain", "0", *options]
        self._command = [sys.executable, "-P", "-m", "schedtop.cli.tied", str(os.getpid()), *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if is_live(self.socket):
            raise ConfigError(f"a demo is running already on {self.socket}: watch it with `schedtop`, or end it")
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )
        try:
            self._wait_until_live(self._process)
        except BaseException:
            self.end()
            raise
        return self

    def _wait_until_live(self, process: "subprocess.Popen[bytes]") -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not is_live(self.socket):
            if process.poll() is not None:
                raise ConfigError(f"the engine ended at start with status {process.returncode}:\n{self._last_words()}")
            if time.monotonic() > deadline:
                raise ConfigError(f"the engine wasn't up within {START_LIMIT_S:g} s:\n{self._last_words()}")
            time.sleep(POLL_S)

    def _last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-NUM_LINES_SHOWN:])

    @property
    def gateway_url(self) -> str | None:
        """Where HTTP is served, once it is."""
        lines = self.log.read_text(errors="replace").splitlines()
        return next((line.split()[-1] for line in lines if line.startswith("gateway on ")), None)

    def end(self) -> None:
        """Ask it to end, then make it; idempotent."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _free_port(wanted: int) -> int:
    """The port that was asked for, or 0 (any) when somebody has it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError:
            return 0
    return wanted
