"""Ending by a signal: leave in good order, or at once when the terminal is gone and leaving hangs on it."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

GRACE_S = {signal.SIGHUP: 1.0, signal.SIGTERM: 5.0}
"""How long leaving in good order may take. After a hang-up nobody is there to see the terminal restored."""


def exit_on_signals(leave: Callable[[int], None]) -> None:
    """Have SIGTERM and SIGHUP call `leave` (with the exit code) in the running event loop.

    Does nothing outside the main thread: there, whoever runs us handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()

    def ended_by(number: int, frame: FrameType | None) -> None:
        code = 128 + number
        guard = threading.Timer(GRACE_S[signal.Signals(number)], os._exit, [code])
        guard.daemon = True
        guard.start()
        if not loop.is_closed():
            loop.call_soon_threadsafe(leave, code)

    for number in GRACE_S:
        signal.signal(number, ended_by)
