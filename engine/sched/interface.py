"""What the engine asks of a scheduler, and how another one than ours is loaded (`--scheduler-cls module:Class`).

A subclass of `Scheduler` changes a rule; an adapter may wrap one, since nothing sets a scheduler's attributes from
outside. A scheduler of its own kind keeps requests, queues and blocks in the same types, so that watchers can read it.
"""

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from schedtop.engine.config import EngineConfig
from schedtop.engine.errors import ConfigError
from schedtop.engine.knobs import Knobs
from schedtop.engine.kv.connector.base import KVConnector
from schedtop.engine.kv.manager import KVCacheManager
from schedtop.engine.outputs import RequestOutput
from schedtop.engine.request import Request
from schedtop.engine.sched.output import ModelRunnerOutput
from schedtop.engine.sched.plan import StepPlan
from schedtop.engine.sched.queue import RequestQueue
from schedtop.engine.sched.stats import KnobChanges, SchedulerStats
from schedtop.engine.snapshot import EventKind, FinishReason, PauseState, Preemption, WaitReason


class SchedulerInterface(Protocol):
    """Plans steps and takes their results. Only the core thread calls it; see `Scheduler` for what each part means."""

    config: EngineConfig
    knobs: Knobs
    clock: Callable[[], float]
    kv: KVCacheManager
    stats: SchedulerStats
    step: int
    requests: dict[str, Request]
    running: list[Request]
    waiting: RequestQueue
    deferred: RequestQueue
    deferred_by_reason: Counter[WaitReason]
    preempted: dict[str, Request]
    num_waiting_tokens: int
    pause_state: PauseState
    last_plan: StepPlan | None

    @property
    def num_waiting(self) -> int:
        """All that wait, deferred ones included."""
        ...

    @property
    def has_unfinished(self) -> bool:
        """Whether a step now could do something."""
        ...

    # the step

    def schedule(self) -> StepPlan:
        """Plan the next step."""
        ...

    def update_from_output(self, plan: StepPlan, result: ModelRunnerOutput) -> list[RequestOutput]:
        """Take the result of the oldest step in flight."""
        ...

    def drop_plan(self, plan: StepPlan, result: ModelRunnerOutput | None = None) -> None:
        """Forget a step in flight whose result won't be used."""
        ...

    def restart_all_in(self, plan: StepPlan) -> None:
        """Send the requests of a step whose result won't be used back to the queue."""
        ...

    def take_ended(self) -> list[RequestOutput]:
        """Ends that no step's result brought, each handed out once."""
        ...

    # requests

    def add_request(self, request: Request) -> None:
        """Queue a request that has passed the door."""
        ...

    def finish(self, request: Request, reason: FinishReason, detail: str = "") -> None:
        """End a live request, whatever its state."""
        ...

    def preempt(self, victim: Request, beneficiary: Request | None = None, plan: StepPlan | None = None) -> None:
        """Throw a running request back to the queue."""
        ...

    def hold(self, request: Request) -> bool:
        """Keep a request from being scheduled; False if it was held."""
        ...

    def release(self, request: Request) -> bool:
        """Undo `hold`; False if it wasn't held."""
        ...

    def defer(self, request: Request, reason: WaitReason) -> None:
        """Take a waiting request out of the queue until `undefer`."""
        ...

    def undefer(self, request: Request) -> None:
        """Put a deferred request back in its old place."""
        ...

    def set_priority(self, request: Request, priority: int) -> None:
        """Give a request a new priority and its place."""
        ...

    def set_max_tokens(self, request: Request, max_tokens: int) -> None:
        """Change where a request ends by length."""
        ...

    # the whole

    def apply_knobs(self, knobs: Knobs) -> None:
        """Replace the knobs, at a step boundary."""
        ...

    def set_pause(self, state: PauseState) -> None:
        """Pause or go on."""
        ...

    def connect(self, connector: KVConnector) -> None:
        """Use a KV connector from now on; no request has been added yet."""
        ...

    def emit(
        self,
        kind: EventKind,
        request: Request | None = None,
        detail: str = "",
        preemption: Preemption | None = None,
        changes: KnobChanges | None = None,
    ) -> None:
        """Record an event."""
        ...


class MakeScheduler(Protocol):
    """A scheduler class, or anything else that makes one."""

    def __call__(self, config: EngineConfig, knobs: Knobs, /, *, clock: Callable[[], float]) -> SchedulerInterface:
        """A scheduler that holds no request yet."""
        ...


def load_scheduler(spec: str) -> MakeScheduler:
    """What `module:Class` names. Raises `ConfigError` saying what is wrong with it, also when it makes no scheduler."""
    make = _find(spec)

    def make_checked(config: EngineConfig, knobs: Knobs, /, *, clock: Callable[[], float]) -> SchedulerInterface:
        try:
            scheduler: SchedulerInterface = make(config, knobs, clock=clock)
        except TypeError as error:
            raise ConfigError(f"scheduler {spec}: {error}; it is called as Class(config, knobs, clock=...)") from error
        missing = [name for name in _members() if not hasattr(scheduler, name)]
        if missing:
            raise ConfigError(
                f"scheduler {spec} lacks {', '.join(missing)}: derive it from schedtop.engine.sched.scheduler:Scheduler"
            )
        return scheduler

    return make_checked


def _find(spec: str) -> Callable[..., Any]:
    module_name, _, class_name = spec.partition(":")
    if not module_name or not class_name:
        raise ConfigError(f"scheduler {spec!r} isn't written module:Class")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except ImportError as error:
        raise ConfigError(f"scheduler {spec}: module {module_name} can't be imported: {error}") from error
    except AttributeError:
        raise ConfigError(f"scheduler {spec}: module {module_name} has no {class_name}") from None
    if not callable(found):
        raise ConfigError(f"scheduler {spec}: {class_name} is no class")
    return found  # type: ignore[no-any-return]


def _members() -> list[str]:
    names = {*SchedulerInterface.__annotations__, *vars(SchedulerInterface)}
    return sorted(name for name in names if not name.startswith("_"))
