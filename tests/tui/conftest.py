"""What the screen's tests share: a real engine on a virtual clock, and a link that answers from it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from desk import Desk

from schedtop.control.measures import Latency, Percentiles
from schedtop.control.messages import (
    AbortRequests,
    Ack,
    AnyCommand,
    ConfirmChange,
    DumpSteps,
    EngineInfo,
    EventBatch,
    GetAudit,
    Goodbye,
    HoldRequests,
    KnobsAck,
    Pause,
    PendingChange,
    PreemptRequests,
    ReleaseRequests,
    Reply,
    RequestFilter,
    Resume,
    SelfCheck,
    SetKnobs,
    SetPriority,
    SnapshotUpdate,
    Subscribe,
    UndoChange,
    Welcome,
)  # fmt: skip
from schedtop.control.recorder import Recorded, RecordingWriter
from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import initial_knobs
from schedtop.engine.outputs import EngineCoreOutputs, Touched
from schedtop.engine.runner.simulated import SimulatedRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sim.clock import VirtualClock
from schedtop.engine.sim.step_model import StepModel
from schedtop.engine.snapshot import EngineCoreEvent, StepRecord, Viewport
from schedtop.tui.app import Options, SchedtopApp
from schedtop.tui.link import Post, Refusal
from schedtop.tui.state import LinkDown, LinkUp, Received

CAPABILITIES = [
    "SetKnobs",
    "SetPriority",
    "AbortRequests",
    "HoldRequests",
    "UndoChange",
    "ConfirmChange",
    "Pause",
    "DumpSteps",
    "GetAudit",
    "PreemptRequests",
    "Drain",
    "ResetPrefixCache",
    "SelfCheck",
]


class EngineLink:
    """A `Link` onto an `EngineCore` in this process, which stands still between calls of `play`."""

    def __init__(self, core: EngineCore, clock: VirtualClock, name: str = "demo", read_only: bool = False) -> None:
        self.core, self.clock = core, clock
        self.read_only = read_only
        self.boot_id = "boot-1"
        self.capabilities = list(CAPABILITIES)
        self.viewport = Viewport()
        self.commands: list[AnyCommand] = []
        self.pending: PendingChange | None = None
        self.audit: list[dict[str, Any]] = []
        self._name = name
        self._post: Post = lambda event: None
        self._records: list[StepRecord] = []
        self._fresh: list[StepRecord] = []
        self._events: list[EngineCoreEvent] = []
        self._undo: dict[str, Any] = {}

    @property
    def target(self) -> str:
        return f"/run/{self._name}.sock"

    async def run(self, post: Post) -> None:
        self._post = post
        self.connect()
        await asyncio.Event().wait()

    def connect(self) -> None:
        self._post(LinkUp(self.target, self.welcome()))
        self.publish()

    def welcome(self) -> Welcome:
        config = self.core.config
        info = EngineInfo(
            name=self._name, model=config.model, boot_id=self.boot_id, pid=1, version="0.1.0",
            num_usable_blocks=config.num_usable_blocks, backend="simulated",
        )  # fmt: skip
        return Welcome(
            protocol=1, info=info, knobs=list(self.core.knob_table), capabilities=self.capabilities,
            read_only=self.read_only,
        )  # fmt: skip

    def change_elsewhere(self, changes: dict[str, Any], client: str = "cli", reason: str = "") -> None:
        """A knob is changed by somebody else."""
        change = self.core.set_knobs(changes)
        self.note("SetKnobs", "done", change.before, change.after, client, reason)

    def note(self, action: str, outcome: str, before: Any, after: Any, client: str, reason: str = "") -> None:
        """A row of the audit log."""
        row = {
            "id": len(self.audit) + 1, "wall": 0.0, "step": self.core.next_step, "uid": 7, "client": client,
            "on_behalf_of": "", "action": action, "outcome": outcome, "reason": reason, "detail": "",
            "change_id": 100 + len(self.audit), "before": dict(before), "after": dict(after),
        }  # fmt: skip
        self.audit.insert(0, row)

    def roll_back(self) -> None:
        """The time of a change on trial is over."""
        change = self.core.set_knobs(self._undo)
        self.pending = None
        self.note("RollBack", "rolled back", change.before, change.after, "schedtop", "not confirmed within 60 s")

    def lose(self, reason: str = "the socket was closed") -> None:
        self._post(LinkDown(self.target, reason, 1.0))

    def play(self, num_steps: int) -> None:
        """Run up to `num_steps` steps."""
        for _ in range(num_steps):
            if not self.core.has_work:
                break
            self._take(self.core.step())

    def _take(self, outputs: EngineCoreOutputs | None) -> None:
        if outputs is None:
            return
        self._events += outputs.events
        if outputs.record is not None:
            self._records.append(outputs.record)
            self._fresh.append(outputs.record)

    def publish(self) -> None:
        """Send what the subscription would have brought."""
        self._take(self.core.take_outputs())
        if self._events:
            self._post(Received(self.target, EventBatch(events=self._events)))
        update = SnapshotUpdate(
            snapshot=self.core.snapshot(self.viewport), latencies=self.latencies(), steps=self._fresh,
            pending_change=self.pending,
        )  # fmt: skip
        self._events, self._fresh = [], []
        self._post(Received(self.target, update))

    def forget(self) -> None:
        """What happened so far is known from the step records only, as when a screen connects later."""
        self._events, self._fresh = [], []

    def latencies(self) -> dict[str, Latency]:
        now = self.clock()
        names: dict[str, Callable[[StepRecord], list[float]]] = {
            "ttft": lambda r: r.ttft,
            "itl": lambda r: [gap for gap, n in r.itl for _ in range(n)],
            "e2e": lambda r: r.e2e,
            "queue": lambda r: r.queue_time,
            "step": lambda r: [r.duration_s],
        }
        return {
            name: Latency(
                now=percentiles([v for r in self._records if r.mono >= now - 10 for v in of(r)]),
                minute=percentiles([v for r in self._records if r.mono >= now - 60 for v in of(r)]),
            )
            for name, of in names.items()
        }

    async def request(self, command: AnyCommand) -> Reply | Refusal:
        self.commands.append(command)
        try:
            return self._carried_out(command)
        except SchedtopError as error:
            return Refusal(error.code, str(error))

    def _carried_out(self, command: AnyCommand) -> Reply:
        core = self.core
        match command:
            case Subscribe(viewport=viewport):
                self.viewport = viewport
                return Ack(id=1, applied_at_step=core.next_step)
            case SetKnobs(changes=changes, expect_generation=expected, confirm_within_s=limit):
                change = core.set_knobs(changes, expected)
                self._undo = dict(change.before)
                by = None if limit is None else self.clock() + limit
                if by is not None:
                    pairs = {name: (change.before[name], change.after[name]) for name in change.after}
                    self.pending = PendingChange(change_id=7, changes=pairs, rolls_back_at_mono=by, actor="tui")
                return self._knobs_ack(change.generation, change.before, change.after, by)
            case UndoChange():
                if not self._undo:
                    return Ack(id=1, applied_at_step=core.next_step, did="nothing to undo")
                change = core.set_knobs(self._undo)
                return self._knobs_ack(change.generation, change.before, change.after, None)
            case ConfirmChange():
                self.pending = None
                return Ack(id=1, applied_at_step=core.next_step, did="kept")
            case SetPriority(select=select, priority=priority):
                return self._touched(core.set_priority(self._ids(select), priority), f"priority {priority}")
            case AbortRequests(select=select):
                return self._touched(core.abort(self._ids(select)), "aborted")
            case HoldRequests(select=select):
                return self._touched(core.hold(self._ids(select)), "held")
            case ReleaseRequests(select=select):
                return self._touched(core.release(self._ids(select)), "released")
            case DumpSteps(count=count):
                return Ack(id=1, applied_at_step=core.next_step, data={"steps": core.recent_steps(count)})
            case PreemptRequests(select=select):
                return self._touched(core.preempt(self._ids(select)), "preempted")
            case SelfCheck():
                faults = core.self_check()
                return Ack(id=1, applied_at_step=core.next_step, did="; ".join(faults) or "nothing wrong")
            case GetAudit():
                return Ack(id=1, applied_at_step=core.next_step, data={"rows": self.audit})
            case Pause(mode=mode):
                found = core.pause(mode)
                return Ack(id=1, applied_at_step=core.next_step, found=found.value, did=f"paused ({mode})")
            case Resume():
                found = core.resume()
                return Ack(id=1, applied_at_step=core.next_step, found=found.value, did="resumed")
        raise AssertionError(f"the screen sent {command}")

    @staticmethod
    def _ids(select: RequestFilter) -> list[str]:
        return list(select.ids)

    def _touched(self, touched: Touched, did: str) -> Ack:
        return Ack(id=1, applied_at_step=self.core.next_step, did=did, touched=touched)

    def _knobs_ack(self, generation: int, before: Any, after: Any, by: float | None) -> KnobsAck:
        return KnobsAck(
            id=1, applied_at_step=self.core.next_step, change_id=7, generation=generation, before=before, after=after,
            confirm_by_mono=by,
        )  # fmt: skip


def percentiles(values: list[float]) -> Percentiles | None:
    """Exact percentiles; None of nothing."""
    if not values:
        return None
    ranked = sorted(values)

    def at(share: float) -> float:
        return ranked[min(len(ranked) - 1, int(share * len(ranked)))]

    return Percentiles(count=len(ranked), p50=at(0.5), p90=at(0.9), p99=at(0.99), max=ranked[-1])


def make_link(name: str = "demo", **overrides: Any) -> EngineLink:
    """An idle engine on a virtual clock; `overrides` are of `EngineConfig`, `knobs` of the knobs."""
    clock = VirtualClock()
    clock.now = 1000.0
    knobs = overrides.pop("knobs", {})
    read_only = overrides.pop("read_only", False)
    runner_of: Callable[[StepModel, Callable[[float], None]], SimulatedRunner] = overrides.pop(
        "runner", SimulatedRunner
    )
    settings: dict[str, Any] = {
        "name": name, "model": "smollm2-135m", "num_kv_blocks": 257, "max_model_len": 4096,
        "max_num_batched_tokens": 512, "max_num_seqs": 16,
    }  # fmt: skip
    config = EngineConfig(**(settings | overrides))
    model = StepModel(base_s=0.008, per_sequence_s=0.0004, per_prefill_token_s=0.00002)
    core = EngineCore(config, runner_of(model, clock.advance), initial_knobs(config, **knobs), clock=clock)
    return EngineLink(core, clock, name, read_only)


def submit(link: EngineLink, request_id: str, num_prompt: int, max_tokens: int, priority: int = 0) -> None:
    """Queue a request whose prompt is shared with nobody."""
    base = sum(map(ord, request_id)) * 1000
    tokens = [base + i for i in range(num_prompt)]
    link.core.add_request(request_id, tokens, SamplingParams(max_tokens=max_tokens, ignore_eos=True), priority)


def load(link: EngineLink) -> None:
    """A busy engine: 16 slots, a queue, a pool that is too small, so that requests get preempted."""
    for i in range(24):
        submit(link, f"chat-{i:03d}", 120 + 37 * (i % 7), 400 + 11 * (i % 5), priority=i % 3)
        link.play(3 if i % 4 == 3 else 0)
    link.play(120)
    link.forget()


@pytest.fixture
def engine_link() -> EngineLink:
    """An idle engine."""
    return make_link()


@pytest.fixture
def busy_link() -> EngineLink:
    """An engine under load, mid-flight."""
    link = make_link()
    load(link)
    return link


@pytest.fixture
def make_app() -> Callable[..., SchedtopApp]:
    """An app on links, with the first link's clock and no timers of its own."""

    def made(*links: EngineLink, **options: Any) -> SchedtopApp:
        return SchedtopApp(links, Options(clock=links[0].clock, tick_s=None, **options))

    return made


@pytest.fixture
def new_link() -> Callable[..., EngineLink]:
    """`make_link`, for tests that need an engine of their own sizes."""
    return make_link


@pytest.fixture
def send() -> Callable[..., None]:
    """`submit(link, id, prompt tokens, output tokens, priority)`."""
    return submit


@pytest.fixture
def at(make_app: Callable[..., SchedtopApp]) -> Callable[..., Any]:
    """Open the screen on a link: `async with at(link, size) as desk`."""

    @asynccontextmanager
    async def opened(link: EngineLink, size: tuple[int, int] = (120, 40), **options: Any) -> AsyncIterator[Desk]:
        app = make_app(link, **options)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            desk = Desk(app, pilot, link)
            await desk.news()
            yield desk

    return opened


NUM_FRAMES = 12


@pytest.fixture
def recording(busy_link: EngineLink, tmp_path: Path) -> Path:
    """Twelve frames of a busy engine in chunks of their own, then its goodbye."""
    path = tmp_path / "busy.rec"
    with RecordingWriter(path) as writer:

        def post(event: Any) -> None:
            message = event.welcome if isinstance(event, LinkUp) else event.message
            writer.add(Recorded(wall=busy_link.clock(), mono=busy_link.clock(), message=message))

        busy_link._post = post
        busy_link.viewport = Viewport(kv_cells=128)
        busy_link.connect()
        for _ in range(NUM_FRAMES - 1):
            busy_link.play(9)
            busy_link.publish()
            writer.flush()
        post_goodbye = Goodbye(reason="shutting down")
        writer.add(Recorded(wall=busy_link.clock() + 1, mono=busy_link.clock() + 1, message=post_goodbye))
    return path
