"""An executor whose threads don't keep the process alive: for work that may never return (a hung library, a dead disk).

`ThreadPoolExecutor` joins its threads when the interpreter exits, so one hung job would make a shutdown hang.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import Empty, SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_Job = tuple[Future[Any], Callable[[], Any]]


class DaemonExecutor(Executor):
    """Runs jobs in at most `num_workers` daemon threads, in the order in which they were submitted."""

    def __init__(self, num_workers: int, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(num_workers)
        ]
        self._is_started = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call; a future that is cancelled before its turn never runs."""
        if not self._is_started:
            self._is_started = True
            for thread in self._threads:
                thread.start()
        future: Future[T] = Future()
        self._jobs.put((future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work; with `wait`, return when what was queued is done, however long that takes."""
        if cancel_futures:
            self._cancel_queued()
        for _ in self._threads:
            self._jobs.put(None)
        if wait and self._is_started:
            for thread in self._threads:
                thread.join()

    def _cancel_queued(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return
            if job is not None:
                job[0].cancel()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del job, future, call
