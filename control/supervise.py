"""Keeps the gateway process running beside the engine: starts it, restarts it with growing pauses, ends it.

It knows no HTTP: only a command line and exit statuses.
"""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

logger = logging.getLogger(__name__)

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
STEADY_S = 60.0
"""A process that has lived so long is restarted without a pause again."""
END_S = 15.0
"""How long it may take to end by itself: longer than a gateway waits for its last answers."""
WRONG_SETTINGS = 2
"""Exit status of a command that can't work as it was started: another start would end the same way."""


class SupervisedProcess:
    """One schedtop command in a process of its own. Call `watch` regularly, from one thread."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """`arguments` as after `schedtop`: gateway, --connect, ..."""
        self.num_starts = 0
        self._command = [sys.executable, "-m", "schedtop.cli.tied", str(os.getpid()), *arguments]
        self._name = arguments[0]
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._next_start_at = 0.0
        self._delay_s = FIRST_DELAY_S
        self._has_given_up = False

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None else None

    def watch(self) -> None:
        """Start the process if it isn't running and its pause is over; never again if its settings can't work."""
        now = time.monotonic()
        if self._process is not None and (status := self._process.poll()) is not None:
            self._process = None
            self._plan_next_start(now, status)
        if self._process is None and not self._has_given_up and now >= self._next_start_at:
            self._start(now)

    def _plan_next_start(self, now: float, status: int) -> None:
        if status == WRONG_SETTINGS:
            self._has_given_up = True
            logger.error("the %s can't work with these settings: it isn't started again", self._name)
            return
        if now - self._started_at >= STEADY_S:
            self._delay_s = FIRST_DELAY_S
        logger.warning("the %s ended with %s; next start in %g s", self._name, _in_words(status), self._delay_s)
        self._next_start_at = now + self._delay_s
        self._delay_s = min(2 * self._delay_s, LONGEST_DELAY_S)

    def _start(self, now: float) -> None:
        environment = {**os.environ, "PYTHONSAFEPATH": "1"}
        self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, env=environment, process_group=0)
        self._started_at = now
        self.num_starts += 1

    def end(self) -> None:
        """Ask it to end, then make it; idempotent."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            logger.warning("the %s didn't end within %g s: killed", self._name, END_S)
            self._process.kill()
            self._process.wait()
        self._process = None


def _in_words(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
