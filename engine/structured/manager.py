"""Compiles grammars beside the engine: in a few worker threads, with a time limit, each schema once.

A request waits for its grammar without holding up others. However many come at once, at most `NUM_WORKERS` compile;
one that takes longer than the limit (waiting for a worker included) fails, and its worker is free when it returns.
A build that nobody waits for any more isn't begun. The library is loaded for the first grammar that is asked for, which
has a limit of its own: the time for building begins when it is there.
"""

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future

from schedtop.engine.daemon_executor import DaemonExecutor
from schedtop.engine.structured.backend import CompiledGrammar, GrammarBackend, LoadedLate

NUM_CACHED = 128
"""Compiled grammars kept for requests to come."""
NUM_WORKERS = 2
TIME_LIMIT_S = 20.0
LOAD_LIMIT_S = 120.0
"""How long loading the library may take, once in a process's life."""

Done = Callable[[str, str, CompiledGrammar | None, str], None]
"""Called as done(request id, schema, grammar or None, what went wrong), mostly in a worker thread."""


class GrammarManager:
    """Builds grammars for requests. `done` is called once per `start`, unless the build was cancelled.

    `loaded` is called in a worker thread when the library is there: `expired` wants to be called then.
    """

    def __init__(
        self,
        backend: GrammarBackend,
        done: Done,
        executor: Executor | None = None,
        loaded: Callable[[], None] = lambda: None,
    ) -> None:
        self._backend = backend
        self._done = done
        self._loaded = loaded
        self._limit_s = TIME_LIMIT_S if _is_loaded(backend) else LOAD_LIMIT_S
        self._executor = executor or DaemonExecutor(NUM_WORKERS, "grammar")
        self._grammars: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        self._deadlines: OrderedDict[str, float] = OrderedDict()
        """When each waiting request gives up, soonest first."""
        self._waiting: dict[str, set[str]] = {}
        """Schema -> requests that wait for it."""
        self._schemas: dict[str, str] = {}

    def start(self, request_id: str, schema: str, now: float) -> None:
        """Compile `schema` for a request, or join a build of the same schema."""
        self._deadlines[request_id] = now + self._limit_s
        self._schemas[request_id] = schema
        self._waiting.setdefault(schema, set()).add(request_id)
        future = self._grammars.get(schema)
        if future is None or (future.done() and future.exception() is not None):
            future = self._grammars[schema] = self._executor.submit(self._compile, schema)
            while len(self._grammars) > NUM_CACHED:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(schema)
        future.add_done_callback(lambda built: self._report(request_id, schema, built))

    def _compile(self, schema: str) -> CompiledGrammar:
        if isinstance(self._backend, LoadedLate) and not self._backend.is_loaded:
            self._backend.load()
            self._loaded()
        return self._backend.compile(schema)

    def forget(self, request_id: str) -> None:
        """The request is served, has failed or is gone; idempotent."""
        self._deadlines.pop(request_id, None)
        schema = self._schemas.pop(request_id, None)
        if schema is None:
            return
        self._waiting[schema].remove(request_id)
        if not self._waiting[schema]:
            del self._waiting[schema]
            self._cancel(schema)

    def _cancel(self, schema: str) -> None:
        """Nobody wants this grammar now: begin no build of it; one at work goes on, for the cache."""
        future = self._grammars.get(schema)
        if future is not None and future.cancel():
            del self._grammars[schema]

    def next_deadline(self) -> float | None:
        """When the next waiting request gives up, on the engine's clock."""
        return next(iter(self._deadlines.values()), None)

    def expired(self, now: float) -> list[str]:
        """Requests whose time is up; they are forgotten."""
        if self._limit_s != TIME_LIMIT_S and _is_loaded(self._backend):
            self._limit_s = TIME_LIMIT_S
            self._deadlines = OrderedDict.fromkeys(self._deadlines, now + TIME_LIMIT_S)
        late = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            late.append(next(iter(self._deadlines)))
            self.forget(late[-1])
        return late

    @property
    def overdue(self) -> str:
        """What to tell those that `expired` names."""
        if self._limit_s == TIME_LIMIT_S:
            return f"grammar not compiled within {TIME_LIMIT_S:g} s"
        return f"the grammar library wasn't loaded within {LOAD_LIMIT_S:g} s; try again"

    def shutdown(self) -> None:
        """Start no further build; a build at work is left to end by itself."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _report(self, request_id: str, schema: str, built: Future[CompiledGrammar]) -> None:
        if built.cancelled():
            return  # nobody waited for it
        if (error := built.exception()) is not None:
            self._done(request_id, schema, None, f"grammar: {type(error).__name__}: {error}")
        else:
            self._done(request_id, schema, built.result(), "")


def _is_loaded(backend: GrammarBackend) -> bool:
    return not isinstance(backend, LoadedLate) or backend.is_loaded
