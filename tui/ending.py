"""Ending by a signal: leave in good order, or at once when the terminal is gone and leaving hangs on it."""

import asyncio
import os
import select
import signal
import threading
from collections.abc import Callable
from types import FrameType

GRACE_S = {signal.SIGHUP: 1.0, signal.SIGTERM: 5.0, signal.SIGQUIT: 5.0}
"""How long leaving in good order may take. After a hang-up nobody is there to see the terminal restored."""


def exit_on_signals(leave: Callable[[int], None]) -> None:
    """Have SIGTERM, SIGHUP and SIGQUIT call `leave` (with the exit code) in the running event loop.

    Does nothing outside the main thread: there, whoever runs us handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    loop = asyncio.get_running_loop()

    def ended_by(number: int, frame: FrameType | None) -> None:
        code = _start_guard(signal.Signals(number))
        if not loop.is_closed():
            loop.call_soon_threadsafe(leave, code)

    for number in GRACE_S:
        signal.signal(number, ended_by)


def leave_if_abandoned(descriptor: int, leave: Callable[[int], None]) -> None:
    """Call `leave` when the terminal is gone without a word: not every way to lose one sends SIGHUP to us.

    Textual's input thread would go on reading the end of a dead terminal, and use a core for it.
    """
    if has_hung_up(descriptor):
        leave(_start_guard(signal.SIGHUP))


def has_hung_up(descriptor: int) -> bool:
    """Whether the other side of a terminal or pipe is gone."""
    watch = select.poll()
    watch.register(descriptor, 0)
    return any(events & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, events in watch.poll(0))


def _start_guard(number: signal.Signals) -> int:
    """End the process after the grace period, whatever hangs; returns the exit code."""
    code = 128 + number
    guard = threading.Timer(GRACE_S[number], os._exit, [code])
    guard.daemon = True
    guard.start()
    return code
