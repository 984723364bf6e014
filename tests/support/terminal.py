"""A terminal for end-to-end tests: the screen in a tmux of its own. No fixtures in here."""

import itertools
import os
import re
import shlex
import subprocess
import time
from types import TracebackType
from typing import Self

from processes import SCHEDTOP, Home

LIMIT_S = 120.0
"""After that a screen that doesn't show what is expected has failed."""
POLL_S = 0.05
_numbers = itertools.count()


class Terminal:
    """`schedtop` in tmux, as an operator sees it. Use it as a context manager."""

    def __init__(
        self, home: Home, *arguments: str, columns: int = 120, lines: int = 40, term: str = "xterm-256color"
    ) -> None:
        number = next(_numbers)
        self._tmux = ["tmux", "-S", str(home.folder / f"tmux{number}.sock"), "-f", os.devnull]
        self._status = home.folder / f"status{number}"
        # The status goes through a file: tmux now and then misses the end of its child and never tells it.
        schedtop = shlex.join(["env", f"TERM={term}", *SCHEDTOP, *arguments])
        command = f"{schedtop}; echo $? >{self._status}.new; mv {self._status}.new {self._status}"
        size = ["-x", str(columns), "-y", str(lines)]
        self._environment = home.environment
        self._run("new-session", "-d", *size, command)
        self._run("set-option", "-g", "remain-on-exit", "on")
        self._run("set-option", "-g", "remain-on-exit-format", "")  # tmux's own words would scroll the first line away

    @property
    def pid(self) -> int:
        """Process id of schedtop."""
        shell = self._run("display-message", "-p", "#{pane_pid}")
        return int(subprocess.run(["pgrep", "-P", shell], capture_output=True, text=True, check=True).stdout)

    @property
    def exit_status(self) -> int | None:
        """Its exit status, None while it runs."""
        return int(self._status.read_text()) if self._status.exists() else None

    def text(self) -> str:
        """What is on the screen now."""
        return self._run("capture-pane", "-p")

    def colours(self) -> set[str]:
        """Parameters of the colour codes on the screen."""
        codes = re.findall(r"\x1b\[([0-9;]*)m", self._run("capture-pane", "-p", "-e"))
        parts = {part for code in codes for part in code.split(";")}
        return {part for part in parts if re.fullmatch(r"(3|4|9|10)[0-8]", part)}

    def press(self, *keys: str) -> None:
        """Send keys, by tmux's names for them."""
        self._run("send-keys", *keys)

    def wait_for_text(self, words: str) -> str:
        """The screen once it shows `words`."""
        deadline = time.monotonic() + LIMIT_S
        while words not in (shown := self.text()):
            assert time.monotonic() < deadline, f"the screen doesn't show {words!r}:\n{shown}"
            time.sleep(POLL_S)
        return shown

    def wait_for_exit(self) -> int:
        """Its exit status once it has ended."""
        deadline = time.monotonic() + LIMIT_S
        while (status := self.exit_status) is None:
            assert time.monotonic() < deadline, f"schedtop doesn't end:\n{self.text()}"
            time.sleep(POLL_S)
        return status

    def _run(self, *arguments: str) -> str:
        run = subprocess.run(
            [*self._tmux, *arguments], env=self._environment, capture_output=True, text=True, check=True
        )
        return run.stdout.rstrip("\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        subprocess.run([*self._tmux, "kill-server"], env=self._environment, capture_output=True, check=False)
