"""A step being planned, and afterwards in flight. Internal to the scheduler: the runner sees `SchedulerOutput`."""

from dataclasses import dataclass, field

from schedtop.engine.encoder.cache import MediaItem
from schedtop.engine.kv.block import KVCacheBlock
from schedtop.engine.request import Request
from schedtop.engine.sched.output import SchedulerOutput
from schedtop.engine.snapshot import LimitedBy, Preemption, WaitReason


@dataclass(slots=True)
class Blocked:
    """Why admission stopped, at which request, in numbers."""

    reason: WaitReason
    request: Request | None = None
    needed: int = 0
    free: int = 0


@dataclass(slots=True)
class Admission:
    """A request admitted in this step."""

    request: Request
    is_resumed: bool
    num_hit_tokens: int


@dataclass(slots=True)
class StepPlan:
    """Who gets how many tokens in one step. `requests` and `num_scheduled_tokens` are in schedule order."""

    step: int
    budget: int
    """Tokens still to be given out."""
    initial_budget: int
    threshold: int
    """Most tokens one request may get; 0 = no limit."""
    is_async: bool
    requests: list[Request] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    spec_token_ids: dict[str, list[int]] = field(default_factory=dict)
    encoder_inputs: dict[str, list[MediaItem]] = field(default_factory=dict)
    """Media to be encoded in this step, by the request they are encoded for."""
    admissions: list[Admission] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    """By this step's pass 1 or by an arrival, in order."""
    preemptions: list[Preemption] = field(default_factory=list)
    blocked: Blocked | None = None
    passed_over: list[Blocked] = field(default_factory=list)
    """With admission skip: requests that didn't fit and were passed."""
    stale: set[str] = field(default_factory=set)
    """Requests whose result is to be dropped when it comes (dropped while in flight)."""
    output: SchedulerOutput | None = None

    num_decode_tokens: int = 0
    num_draft_tokens: int = 0
    num_context_tokens: int = 0
    largest_prefill_chunk: int = 0
    limited_by: LimitedBy = LimitedBy.NOTHING_WAITING
    started_at: float = 0.0
    schedule_s: float = 0.0

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens given out."""
        return self.initial_budget - self.budget

    def count_chunk(self, num_computed: int, num_tokens: int, is_decode: bool = False) -> None:
        """Note a share of several tokens: its size, unless it is a decode token with its drafts, and its context."""
        if is_decode:
            self.num_decode_tokens += 1
        else:
            self.largest_prefill_chunk = max(self.largest_prefill_chunk, num_tokens)
        self.num_context_tokens += num_attended(num_computed, num_tokens)

    def give(self, request: Request, num_tokens: int, new_blocks: list[KVCacheBlock]) -> None:
        """Give a request its share: the plan and the request both count it."""
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.requests.append(request)
        self.budget -= num_tokens
        request.num_computed_tokens += num_tokens
        request.planned_in = self.step
        request.planned_tokens = num_tokens
        if new_blocks:
            self.new_block_ids[request.request_id] = [block.block_id for block in new_blocks]

    def take_back(self, request: Request) -> int:
        """Withdraw a request planned in this very step; returns the tokens that go back to the budget."""
        num_tokens = self.num_scheduled_tokens.pop(request.request_id, 0)
        if num_tokens:
            self.requests.remove(request)
            self.new_block_ids.pop(request.request_id, None)
            self.num_draft_tokens -= len(self.spec_token_ids.pop(request.request_id, ()))
            self.budget += num_tokens
            request.num_computed_tokens -= num_tokens
            request.planned_tokens = 0
        return num_tokens


def num_attended(num_computed: int, num_tokens: int) -> int:
    """Context tokens that `num_tokens` tokens after `num_computed` attend to, each to itself and all before it."""
    return num_tokens * num_computed + num_tokens * (num_tokens + 1) // 2
