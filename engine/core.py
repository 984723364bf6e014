"""EngineCore: boundary calls in, one step, snapshot out. The core thread is the only one that touches it."""

from collections.abc import Mapping, Sequence
from typing import Literal

from schedtop.engine.config import EngineConfig
from schedtop.engine.knobs import Knobs, KnobValue
from schedtop.engine.outputs import EngineCoreOutputs, KnobChange, Touched
from schedtop.engine.runner.base import ModelRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.snapshot import PauseState, Snapshot, StepRecord, Viewport


class EngineCore:
    """The engine: a scheduler, a runner and the books. All methods are for the core thread (see `loop.py`)."""

    def __init__(self, config: EngineConfig, runner: ModelRunner, knobs: Knobs | None = None) -> None: ...

    @property
    def has_work(self) -> bool:
        """Whether `step()` would do something."""
        raise NotImplementedError

    @property
    def next_step(self) -> int:
        """Number of the next step to be planned."""
        raise NotImplementedError

    def step(self) -> EngineCoreOutputs:
        """Plan, run and take one step."""
        raise NotImplementedError

    def take_outputs(self) -> EngineCoreOutputs | None:
        """What boundary calls produced since the last step (ends of aborted requests, events); None if nothing."""
        raise NotImplementedError

    # ---- boundary calls -------------------------------------------------------------------------------------

    def add_request(
        self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams, priority: int = 0,
        adapter: str | None = None, cache_salt: str | None = None,
    ) -> None:  # fmt: skip
        """Queue a request. Raises `RequestRefused` (never fits, bad settings, id in use) or `QueueFull`."""
        raise NotImplementedError

    def match(
        self, ids: Sequence[str] = (), id_prefix: str | None = None, priority_at_least: int | None = None,
        priority_at_most: int | None = None, status: str | None = None,
    ) -> list[str]:  # fmt: skip
        """Ids asked for (live or not, in their order) or the live ids for which all given conditions hold."""
        raise NotImplementedError

    def abort(self, ids: Sequence[str], detail: str = "") -> Touched:
        """End requests with reason abort; their ends come out of `take_outputs`."""
        raise NotImplementedError

    def set_priority(self, ids: Sequence[str], priority: int) -> Touched:
        """Give requests a new priority and re-order the queue."""
        raise NotImplementedError

    def preempt(self, ids: Sequence[str]) -> Touched:
        """Throw running requests back to the queue."""
        raise NotImplementedError

    def hold(self, ids: Sequence[str]) -> Touched:
        """Keep requests from being scheduled; running ones are preempted first."""
        raise NotImplementedError

    def release(self, ids: Sequence[str]) -> Touched:
        """Undo `hold`."""
        raise NotImplementedError

    def set_max_tokens(self, ids: Sequence[str], max_tokens: int) -> Touched:
        """Change how many tokens requests may generate; at least what they have generated, else `SchedtopError`."""
        raise NotImplementedError

    def set_knobs(
        self, changes: Mapping[str, KnobValue], expect_generation: int | None = None, dry_run: bool = False
    ) -> KnobChange:
        """Check and replace the knobs, all or none. Raises `KnobRefused` or `Conflict`."""
        raise NotImplementedError

    def pause(self, mode: Literal["abort", "wait", "keep"]) -> PauseState:
        """Pause; returns the state found. See `control.messages.Pause` for the modes."""
        raise NotImplementedError

    def resume(self) -> PauseState:
        """Go on; returns the state found."""
        raise NotImplementedError

    def start_drain(self) -> int:
        """Admit nobody new but re-admit preempted requests, until `resume`; returns the number still live."""
        raise NotImplementedError

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget cached prefixes; False when blocks in use prevented it."""
        raise NotImplementedError

    def self_check(self) -> list[str]:
        """Prove block and reference accounting; one sentence per fault, so an empty list is a clean bill."""
        raise NotImplementedError

    def snapshot(self, viewport: Viewport) -> Snapshot:
        """The engine as it stands at this boundary, cut to `viewport`."""
        raise NotImplementedError

    def recent_steps(self, count: int) -> list[StepRecord]:
        """The newest `count` step records, oldest first."""
        raise NotImplementedError
