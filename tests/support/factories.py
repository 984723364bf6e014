"""What engine tests share: engines with a fake runner, requests given by their lengths, runs that are written down.

No fixtures and no assertions about rules in here; `oracle` says what a request must answer on any engine.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.knobs import KNOB_NAMES, Knobs, initial_knobs
from schedtop.engine.outputs import EngineCoreOutputs, RequestOutput
from schedtop.engine.request import Request
from schedtop.engine.runner.fake import FakeRunner, hash_of_prefix
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sched.output import ModelRunnerOutput, SchedulerOutput
from schedtop.engine.sched.plan import StepPlan
from schedtop.engine.sched.scheduler import Scheduler
from schedtop.engine.sim.clock import VirtualClock
from schedtop.engine.snapshot import FinishReason

CONFIG_NAMES = set(EngineConfig.__struct_fields__)


def make_config(usable: int = 1000, **settings: Any) -> EngineConfig:
    """Sizes of a test engine; `usable` counts the KV blocks that requests can use."""
    fields = {"max_num_batched_tokens": 2048, **settings}
    fields.setdefault("max_num_seqs", min(64, fields["max_num_batched_tokens"]))
    null_block = fields.setdefault("null_block", True)
    fields.setdefault("num_kv_blocks", usable + null_block)
    return EngineConfig(**fields)


def split_settings(settings: dict[str, Any]) -> tuple[EngineConfig, Knobs]:
    """A config and start knobs from one set of names: what both have goes to the config, the ceiling.

    Prefix caching is off unless asked for. `knobs` holds live values below a ceiling.
    """
    knobs: dict[str, Any] = {"prefix_caching": False, **settings.pop("knobs", {})}
    knobs |= {name: settings.pop(name) for name in list(settings) if name in KNOB_NAMES and name not in CONFIG_NAMES}
    config = make_config(**settings)
    return config, initial_knobs(config, **knobs)


class RecordingScheduler(Scheduler):
    """Keeps every plan, in order; `plans[n]` is step n counted from 0."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.plans: list[StepPlan] = []

    def schedule(self) -> StepPlan:
        plan = super().schedule()
        self.plans.append(plan)
        return plan


def make_scheduler(**settings: Any) -> RecordingScheduler:
    """A bare scheduler on a clock that stands still."""
    config, knobs = split_settings(settings)
    return RecordingScheduler(config, knobs, clock=VirtualClock())


def prompt(length: int, seed: int = 0) -> list[int]:
    """`length` tokens that no prompt of another seed starts with."""
    return [(seed * 7919 + place * 31 + 1) % 1000 for place in range(length)] if length else []


def make_request(request_id: str, length: int, max_tokens: int = 8, seed: int | None = None, **fields: Any) -> Request:
    """A request as it comes through the door; its prompt is its own unless `seed` is shared."""
    names = SamplingParams.__struct_fields__
    sampling = {name: fields.pop(name) for name in list(fields) if name in names}
    tokens = prompt(length, sum(map(ord, request_id)) * 131 + len(request_id) if seed is None else seed)
    return Request(request_id, tokens, SamplingParams(max_tokens=max_tokens, **sampling), **fields)


def make_requests(count: int, length: int, max_tokens: int = 8, prefix: str = "r", **fields: Any) -> list[Request]:
    """`count` alike requests, `r0` first, each with its own prompt."""
    return [
        make_request(f"{prefix}{index}", length, max_tokens, seed=1 + index, arrival_time=float(index), **fields)
        for index in range(count)
    ]


def sample(plan: StepPlan, token: int = 5) -> ModelRunnerOutput:
    """What a runner would answer: a token for each request whose known tokens are all computed."""
    assert plan.output is not None
    sampled = []
    for request in plan.requests:
        pending = request.num_output_placeholders if plan.is_async else 0
        is_done = request.num_computed_tokens >= request.num_tokens + max(pending - 1, 0)
        sampled.append([token] if is_done else [])
    return ModelRunnerOutput(sampled_token_ids=sampled)


def run_steps(sched: Scheduler, count: int = 1, token: int = 5) -> list[StepPlan]:
    """Plan and take `count` steps one after the other; returns the plans."""
    plans = []
    for _ in range(count):
        plan = sched.schedule()
        plans.append(plan)
        sched.update_from_output(plan, sample(plan, token))
    return plans


def tokens_of(plan: StepPlan) -> dict[str, int]:
    """Request id -> tokens given, in schedule order."""
    return dict(plan.num_scheduled_tokens)


class StrictRunner(FakeRunner):
    """A fake runner that also fails when it is told things in an impossible order."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        scheduled = scheduler_output.num_scheduled_tokens
        assert all(count > 0 for count in scheduled.values()), "a request was planned with no token"
        assert scheduler_output.total_num_scheduled_tokens == sum(scheduled.values())
        return super().execute_model(scheduler_output)


@dataclass
class Taken:
    """All that a run handed out."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, RequestOutput] = field(default_factory=dict)
    first_step: dict[str, int] = field(default_factory=dict)
    """Step, from 0, whose result held a request's first token ..."""
    end_step: dict[str, int] = field(default_factory=dict)
    """... and its end."""
    steps: list[EngineCoreOutputs] = field(default_factory=list)


class Engine:
    """An `EngineCore` with a fake runner on a virtual clock, and everything it handed out."""

    def __init__(
        self,
        runner: FakeRunner | None = None,
        eos: Sequence[int] = (),
        scheduler_cls: Callable[..., RecordingScheduler] = RecordingScheduler,
        vocab_size: int | None = None,
        **settings: Any,
    ) -> None:
        config, knobs = split_settings(settings)
        self.clock = VirtualClock()
        self.runner = runner or StrictRunner(config.block_size)
        self.sched = scheduler_cls(config, knobs, clock=self.clock)
        self.core = EngineCore(
            config, self.runner, clock=self.clock, eos_token_ids=eos, vocab_size=vocab_size, scheduler=self.sched
        )
        self.taken = Taken()
        self._due: deque[tuple[int, Callable[[], Any]]] = deque()

    @property
    def plans(self) -> list[StepPlan]:
        return self.sched.plans

    @property
    def num_free(self) -> int:
        return self.sched.kv.pool.num_free

    def add(
        self, request_id: str, length: int | list[int], max_tokens: int = 8, seed: int | None = None, **fields: Any
    ) -> None:
        """Queue a request; `length` is a number of prompt tokens or the prompt itself."""
        if isinstance(length, int):
            length = make_request(request_id, length, seed=seed).token_ids
        names = SamplingParams.__struct_fields__
        sampling = {name: fields.pop(name) for name in list(fields) if name in names}
        self.core.add_request(request_id, length, SamplingParams(max_tokens=max_tokens, **sampling), **fields)

    def at(self, step: int, act: Callable[[], Any]) -> None:
        """Do something right before step `step` (from 0) is planned; in order of the steps."""
        self._due.append((step, act))

    def step(self) -> EngineCoreOutputs | None:
        """One engine step, 1 s long."""
        while self._due and self._due[0][0] <= len(self.plans):
            self._due.popleft()[1]()
        self.take(self.core.take_outputs())
        if not self.core.has_work:
            return None
        self.clock.advance(1.0)
        outputs = self.core.step()
        self.take(outputs)
        return outputs

    def take(self, outputs: EngineCoreOutputs | None) -> None:
        if outputs is None:
            return
        self.taken.steps.append(outputs)
        for output in outputs.outputs:
            if output.new_token_ids:
                self.taken.first_step.setdefault(output.request_id, outputs.step - 1)
            self.taken.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                assert output.request_id not in self.taken.ends, "a request ended twice"
                self.taken.ends[output.request_id] = output
                self.taken.end_step[output.request_id] = outputs.step - 1

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def run(self, most: int = 5000) -> Taken:
        """Step until nothing is left to do; fails if that takes more than `most` steps."""
        for _ in range(most):
            while self._due and not self.core.has_work:
                self._due.popleft()[1]()
            self.step()
            if not self.core.has_work and not self._due:
                self.take(self.core.take_outputs())
                return self.taken
        raise AssertionError(f"still not done after {most} steps: {list(self.sched.requests.values())[:5]}")

    def first_planned(self, request_id: str) -> int:
        """Step (from 0) that first gave a request tokens."""
        return next(index for index, plan in enumerate(self.plans) if request_id in plan.num_scheduled_tokens)

    def total_planned(self, request_id: str) -> int:
        """Tokens that all steps together gave a request."""
        return sum(plan.num_scheduled_tokens.get(request_id, 0) for plan in self.plans)

    def reasons(self) -> dict[str, FinishReason]:
        """Why each request ended."""
        return {
            request_id: output.finish_reason
            for request_id, output in self.taken.ends.items()
            if output.finish_reason is not None
        }


def oracle(prompt_tokens: Sequence[int], count: int, eos: Iterable[int] = ()) -> list[int]:
    """The output of a `FakeRunner` for a prompt, worked out without any engine."""
    next_token, stops = hash_of_prefix(), set(eos)
    tokens = list(prompt_tokens)
    for _ in range(count):
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt_tokens) :]
