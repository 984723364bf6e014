"""A vLLM scheduler behind the face that the control server knows from `EngineLoop`: an inbox, an outbox, a wake-up.

Commands are read from a deque and results left in another one. A control thread that sleeps is woken by a third thread:
writing to its wake-up pipe here would let go of the GIL, and getting that back can cost the engine milliseconds.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from schedtop.engine.errors import SchedtopError
from schedtop.engine.loop import Call
from schedtop.engine.outputs import EngineCoreOutputs

logger = logging.getLogger(__name__)


class VllmEngine:
    """Carries calls into vLLM's engine thread and outputs back; `core` is what the calls act on."""

    def __init__(self, core: Any, wake_engine: Callable[[], None]) -> None:
        self.core = core
        self.outbox: deque[Call | EngineCoreOutputs] = deque()
        self.watcher_parked = False
        self.wake_watcher: Callable[[], None] = lambda: None
        self.failure: BaseException | None = None
        self.is_idle = True
        self.is_alive = True
        self._wake_engine = wake_engine
        self._inbox: deque[Call] = deque()
        self._rings: SimpleQueue[None] = SimpleQueue()
        threading.Thread(target=self._ring_on, name="control-bell", daemon=True).start()

    def submit(self, operation: Callable[[Any], Any], tag: Any = None) -> Call:
        """Have `operation(core)` run at the next boundary; an idle engine is woken for it. Thread-safe."""
        call = Call(operation, tag)
        self._inbox.append(call)
        if self.is_idle:
            self._wake_engine()
        return call

    @property
    def has_calls(self) -> bool:
        """Whether something was submitted and not run yet."""
        return bool(self._inbox)

    def boundary(self) -> None:
        """Run what was submitted. Engine thread only; whatever goes wrong stays in the call."""
        while self._inbox:
            call = self._inbox.popleft()
            try:
                call.result = call.operation(self.core)
            except SchedtopError as error:
                call.error = error
            except Exception as error:
                logger.exception("a command failed inside the engine; the engine goes on")
                call.error = SchedtopError(f"the command failed inside vLLM: {type(error).__name__}: {error}")
            call.step = self.core.next_step
            self.hand_out(self.core.take_outputs())
            self.hand_out(call)

    def hand_out(self, item: Call | EngineCoreOutputs | None) -> None:
        """Leave something for the control thread, waking it if it sleeps."""
        if item is None:
            return
        self.outbox.append(item)
        self.ring()

    def ring(self) -> None:
        """Have the control thread woken if it sleeps."""
        if self.watcher_parked:
            self.watcher_parked = False
            self._rings.put(None)

    def _ring_on(self) -> None:
        while True:
            self._rings.get()
            self.wake_watcher()
