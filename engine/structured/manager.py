"""Compiles grammars beside the engine: in a few worker threads, with a time limit, each schema once.

A request waits for its grammar without holding up others. However many come at once, at most `num_workers` compile;
one that takes longer than the limit (waiting for a worker included) fails, and its worker is free when it returns.
"""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from schedtop.engine.structured.backend import CompiledGrammar, GrammarBackend

NUM_CACHED = 128
Done = Callable[[str, CompiledGrammar | None, str], None]
"""Called as done(request id, grammar or None, what went wrong), in a worker thread."""


class GrammarManager:
    """Builds grammars for requests. `done` is called once per request that `start`ed and wasn't `forget`ten."""

    def __init__(
        self, backend: GrammarBackend, done: Done, *, num_workers: int = 2, time_limit_s: float = 20.0
    ) -> None:
        self.time_limit_s = time_limit_s
        self._backend = backend
        self._done = done
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="grammar")
        self._grammars: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        self._deadlines: OrderedDict[str, float] = OrderedDict()
        """When each waiting request gives up, soonest first."""

    def start(self, request_id: str, schema: str, now: float) -> None:
        """Compile `schema` for a request, or join a build of the same schema."""
        self._deadlines[request_id] = now + self.time_limit_s
        future = self._grammars.get(schema)
        if future is None or (future.done() and future.exception() is not None):
            future = self._grammars[schema] = self._executor.submit(self._backend.compile, schema)
            while len(self._grammars) > NUM_CACHED:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(schema)
        future.add_done_callback(lambda built: self._report(request_id, built))

    def forget(self, request_id: str) -> None:
        """The request is served, has failed or is gone."""
        self._deadlines.pop(request_id, None)

    def next_deadline(self) -> float | None:
        """When the next waiting request gives up, on the engine's clock."""
        return next(iter(self._deadlines.values()), None)

    def expired(self, now: float) -> list[str]:
        """Requests whose time is up; they are forgotten."""
        late = [request_id for request_id, deadline in self._deadlines.items() if deadline <= now]
        for request_id in late:
            self.forget(request_id)
        return late

    def shutdown(self) -> None:
        """Start no further build; a build at work is left to end by itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _report(self, request_id: str, built: Future[CompiledGrammar]) -> None:
        if built.cancelled():
            self._done(request_id, None, "the engine is shutting down")
        elif (error := built.exception()) is not None:
            self._done(request_id, None, f"grammar: {type(error).__name__}: {error}")
        else:
            self._done(request_id, built.result(), "")
