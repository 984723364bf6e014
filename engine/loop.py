"""The core thread: take calls at the step boundary, run a step, hand everything out. Sleeps when idle.

Nothing in here makes a system call while steps run: results are left in `outbox`, plain memory that another thread
polls. Only when that thread has parked itself does the core thread wake it.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from schedtop.engine.core import EngineCore
from schedtop.engine.errors import SchedtopError
from schedtop.engine.outputs import EngineCoreOutputs

Operation = Callable[[EngineCore], Any]


class Call:
    """One operation on its way through the inbox; done when `step` is set.

    `result` is what the operation returned, `error` what it raised. `step` is the first step that sees its effect.
    """

    __slots__ = ("error", "operation", "result", "step", "tag")

    def __init__(self, operation: Operation, tag: Any) -> None:
        self.operation = operation
        self.tag = tag
        self.result: Any = None
        self.error: SchedtopError | None = None
        self.step: int | None = None


class EngineLoop:
    """Runs an `EngineCore` in a thread of its own; everything else talks to it through `submit` and `outbox`."""

    def __init__(self, core: EngineCore, wake_watcher: Callable[[], None] = lambda: None) -> None:
        self.core = core
        self.outbox: deque[Call | EngineCoreOutputs] = deque()
        self.watcher_parked = False
        """Set by the polling thread (before it looks at `outbox` once more) when it goes to sleep."""
        self.failure: BaseException | None = None
        """What ended the thread, if it ended by a bug."""
        self.wake_watcher = wake_watcher
        """Called in the core thread, and only when `watcher_parked` is set or the thread ends."""
        self.is_idle = False
        """Asleep until something is submitted: a hint for the polling thread that it may park itself."""
        self._inbox: deque[Call] = deque()
        self._work = threading.Condition()
        self._stopping = False
        self._has_ended = False
        core.on_mail = self._notify
        self._thread = threading.Thread(target=self._run, name="engine-core", daemon=True)

    def start(self) -> None:
        """Start the core thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Finish the step at hand and end the thread; idempotent."""
        with self._work:
            self._stopping = True
            self._work.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def submit(self, operation: Operation, tag: Any = None) -> Call:
        """Have `operation(core)` run at the next step boundary; the `Call` comes back through `outbox`.

        Thread-safe. An idle engine runs it at once.
        """
        call = Call(operation, tag)
        self._inbox.append(call)
        self._notify()
        return call

    @property
    def is_alive(self) -> bool:
        """False before start, after stop, and after a bug ended the thread."""
        return self._thread.is_alive() and not self._has_ended

    def _notify(self) -> None:
        with self._work:
            self._work.notify()

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._boundary()
                if self.core.has_work:
                    self._hand_out(self.core.step())
                else:
                    self._sleep()
        except BaseException as failure:
            self.failure = failure
            raise
        finally:
            self._has_ended = True  # before the wake-up, or the watcher might find us alive and park for ever
            self.wake_watcher()

    def _boundary(self) -> None:
        while self._inbox:
            call = self._inbox.popleft()
            try:
                call.result = call.operation(self.core)
            except SchedtopError as error:
                call.error = error
            call.step = self.core.next_step
            self._hand_out(self.core.take_outputs())
            self._hand_out(call)

    def _hand_out(self, item: Call | EngineCoreOutputs | None) -> None:
        if item is None:
            return
        self.outbox.append(item)
        if self.watcher_parked:
            self.watcher_parked = False
            self.wake_watcher()

    def _sleep(self) -> None:
        with self._work:
            while not self._inbox and not self._stopping and not self.core.has_work:
                self.is_idle = True
                self._work.wait(self.core.seconds_to_deadline)
            self.is_idle = False
