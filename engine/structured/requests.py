"""Requests that want structured output: they wait aside while their grammar is compiled, and fail if it isn't.

Ties the `GrammarManager`, which works in other threads, to the scheduler, which only the core thread may touch:
results come back through `post`.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol

from schedtop.engine.errors import RequestRefused
from schedtop.engine.request import Request
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sched.interface import SchedulerInterface
from schedtop.engine.snapshot import FinishReason, WaitReason
from schedtop.engine.structured.backend import CompiledGrammar, GrammarBackend
from schedtop.engine.structured.manager import GrammarManager

Post = Callable[[Callable[[], None]], None]


class Grammars(Protocol):
    """What the engine core asks of structured output."""

    def check(self, sampling: SamplingParams) -> None:
        """Raise `RequestRefused` for a grammar that can't be had here."""

    def start(self, request: Request, now: float) -> None:
        """A request was queued: if it wants a grammar it waits aside until that is there."""

    def forget(self, request_id: str) -> None:
        """A request is gone."""

    def next_deadline(self) -> float | None:
        """When a waiting request gives up, on the engine's clock."""

    def expire(self, now: float) -> None:
        """End the requests whose time is up."""

    def shutdown(self) -> None:
        """Compile nothing more."""


class NoGrammars:
    """For engines without a grammar backend."""

    def check(self, sampling: SamplingParams) -> None:
        """Refuse every grammar."""
        if sampling.grammar is not None:
            raise RequestRefused("structured output asked for, but this engine has no grammar backend")

    def start(self, request: Request, now: float) -> None:
        """No request wants one."""

    def forget(self, request_id: str) -> None:
        """None is waiting."""

    def next_deadline(self) -> float | None:
        """None is waiting."""
        return None

    def expire(self, now: float) -> None:
        """None is waiting."""

    def shutdown(self) -> None:
        """Nothing runs."""


class CompiledAside:
    """Grammars compiled in worker threads."""

    def __init__(
        self, backend: GrammarBackend, scheduler: SchedulerInterface, post: Post, executor: Executor | None = None
    ) -> None:
        self._scheduler = scheduler
        self._post = post
        self._manager = GrammarManager(backend, self._built, executor, loaded=lambda: post(_look_at_deadlines))

    def check(self, sampling: SamplingParams) -> None:
        """Every grammar may be tried."""

    def start(self, request: Request, now: float) -> None:
        """A request was queued: if it wants a grammar it waits aside until that is there."""
        if request.sampling.grammar is not None:
            self._scheduler.defer(request, WaitReason.GRAMMAR)
            self._manager.start(request.request_id, request.sampling.grammar, now)

    def forget(self, request_id: str) -> None:
        """A request is gone."""
        self._manager.forget(request_id)

    def next_deadline(self) -> float | None:
        """When a waiting request gives up, on the engine's clock."""
        return self._manager.next_deadline()

    def expire(self, now: float) -> None:
        """End the requests whose time is up."""
        for request_id in self._manager.expired(now):
            if (request := self._waiting(request_id)) is not None:
                self._scheduler.finish(request, FinishReason.ERROR, self._manager.overdue)

    def shutdown(self) -> None:
        """Compile nothing more."""
        self._manager.shutdown()

    def _built(self, request_id: str, schema: str, grammar: CompiledGrammar | None, error: str) -> None:
        self._post(lambda: self._take(request_id, schema, grammar, error))

    def _take(self, request_id: str, schema: str, grammar: CompiledGrammar | None, error: str) -> None:
        request = self._waiting(request_id)
        if request is None or request.sampling.grammar != schema:
            return  # gone meanwhile, its id perhaps in use again
        self._manager.forget(request_id)
        if grammar is None:
            self._scheduler.finish(request, FinishReason.ERROR, error)
        else:
            request.grammar = grammar
            self._scheduler.undefer(request)

    def _waiting(self, request_id: str) -> Request | None:
        request = self._scheduler.requests.get(request_id)
        return request if request is not None and request.defer_reason is WaitReason.GRAMMAR else None


def grammars_for(
    backend: GrammarBackend | None, scheduler: SchedulerInterface, post: Post, executor: Executor | None = None
) -> Grammars:
    """Structured output as far as this engine can; `executor` is where grammars are compiled."""
    return NoGrammars() if backend is None else CompiledAside(backend, scheduler, post, executor)


def _look_at_deadlines() -> None:
    """Mail with nothing to do: the core calls `expire` whenever it reads its mail."""
