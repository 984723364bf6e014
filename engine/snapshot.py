"""What the engine publishes: frozen structs that watchers read. Nothing here reaches back into the engine.

Times: `mono` is `time.monotonic()` of the engine's machine in seconds, `wall` is `time.time()`. On a virtual clock
both are the virtual time. New fields go last and have defaults, so that older clients keep reading.
"""

from enum import StrEnum

import msgspec

from schedtop.engine.knobs import Knobs

MAX_SCANNED = 10_000
"""Requests of one queue that a viewport's filter or sort looks at: bounds what a watcher can cost the engine."""


class RequestStatus(StrEnum):
    """Where a live request stands. Finished requests leave the engine with a `FinishReason`."""

    WAITING = "waiting"
    DEFERRED = "deferred"
    """Waiting for something besides room: grammar, KV transfer, adapter slot, an operator's hold."""
    RUNNING = "running"
    PREEMPTED = "preempted"


class FinishReason(StrEnum):
    """Why a request ended: one each."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    CAPACITY = "capacity"
    REPETITION = "repetition"


class WaitReason(StrEnum):
    """Why a request isn't running right now."""

    NOT_LOOKED_AT = "not looked at yet"
    KV_BLOCKS = "KV blocks"
    BEHIND = "behind a blocked request"
    SEQUENCE_CAP = "sequence cap"
    BUDGET = "budget spent"
    WHOLE_PROMPT = "prompt exceeds budget"
    PREEMPTION = "admission stopped by a preemption"
    PAUSED = "paused"
    GRAMMAR = "grammar compiling"
    KV_TRANSFER = "KV arriving"
    ADAPTER_SLOTS = "adapter slots full"
    ENCODER = "encoder budget or cache"
    HELD = "held by operator"
    IN_FLIGHT = "preempted, result in flight"


class LimitedBy(StrEnum):
    """What kept a step from doing more."""

    BUDGET = "budget"
    SEQUENCES = "sequences"
    BLOCKS = "blocks"
    COMPUTE = "compute"
    """Everything ready was scheduled in full: only a faster step would do more."""
    NOTHING_WAITING = "nothing waiting"
    PAUSED = "paused"
    ENCODER = "encoder"
    """Encoder budget or cache."""


class PauseState(StrEnum):
    """`new`: nobody is admitted, running requests go on; `all`: nothing is scheduled."""

    RUNNING = "running"
    PAUSED_NEW = "new"
    PAUSED_ALL = "all"


class PoolUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of the KV pool: free + in_use + held + pending = usable.

    `cached` counts the free blocks that still hold a hashed prefix (part of `free`); `shared` the blocks in use by
    more than one request (part of `in_use`). held = kept for a transfer; pending = freed, but a step in flight may
    still write them.
    """

    usable: int
    free: int
    in_use: int
    held: int = 0
    pending: int = 0
    cached: int = 0
    shared: int = 0
    block_size: int = 16


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One live request as a table shows it. Token counts in tokens, times in `mono` seconds."""

    request_id: str
    status: RequestStatus
    priority: int
    arrived: float
    num_prompt_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int = 0
    num_blocks: int = 0
    num_scheduled_tokens: int = 0
    """Tokens given to it in the last step."""
    num_preemptions: int = 0
    num_lost_tokens: int = 0
    """Computed tokens thrown away by its preemptions."""
    first_token_at: float | None = None
    last_token_at: float | None = None
    position: int | None = None
    """Place in schedule order among the waiting, from 0; None while running."""
    wait_reason: WaitReason | None = None
    wait_detail: str = ""
    """The reason in words and numbers, e.g. `needs 32 blocks, 20 free`."""


class Preemption(msgspec.Struct, frozen=True, kw_only=True):
    """One request thrown out, for whom, and what it cost."""

    step: int
    mono: float
    victim: str
    beneficiary: str | None
    """None: an operator preempted it."""
    num_lost_tokens: int
    num_blocks_freed: int
    free_blocks_before: int
    free_blocks_after: int
    num_preemptions: int
    """How often the victim has been preempted, this time included."""


class EventKind(StrEnum):
    """What can happen to a request or to the engine."""

    QUEUED = "queued"
    SCHEDULED = "scheduled"
    PREEMPTED = "preempted"
    RESUMED = "resumed"
    FINISHED = "finished"
    REFUSED = "refused"
    KNOBS_CHANGED = "knobs_changed"
    PRIORITY_CHANGED = "priority_changed"
    PAUSED = "paused"
    UNPAUSED = "unpaused"
    CACHE_RESET = "cache_reset"


class EngineCoreEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened, in order; `sequence` has no gaps, so a reader can tell that it missed some."""

    sequence: int
    kind: EventKind
    step: int
    mono: float
    wall: float
    request_id: str | None = None
    detail: str = ""
    preemption: Preemption | None = None
    changes: dict[str, tuple[bool | int | float | str, bool | int | float | str]] = {}
    """Knob name -> (before, after)."""


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one step did: the flight recorder's unit. Durations in seconds."""

    step: int
    mono: float
    """When the step's result had been taken."""
    wall: float
    duration_s: float
    """From the start of planning to the end of taking the result."""
    schedule_s: float
    forward_s: float
    update_s: float
    budget: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_draft_tokens: int
    num_scheduled_reqs: int
    largest_prefill_chunk: int
    num_running: int
    num_waiting: int
    num_deferred: int
    blocks_free: int
    blocks_in_use: int
    num_admitted: int
    num_resumed: int
    num_preempted: int
    num_finished: int
    num_lost_tokens: int
    num_output_tokens: int
    limited_by: LimitedBy
    ttft: list[float]
    """Time from arrival to first token, of requests whose first token this step sampled."""
    itl: list[tuple[float, int]]
    """Gaps between consecutive output tokens ending in this step: (seconds, how many)."""
    e2e: list[float]
    queue_time: list[float]
    """Arrival to first admission, of the requests admitted in this step."""
    num_context_tokens: int = 0
    """Context tokens attended to, summed over the scheduled tokens: each attends to itself and all before it."""


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since start. added = finished (all reasons) + running + waiting; refused is apart."""

    added: int = 0
    refused: int = 0
    finished: dict[str, int] = {}
    """By `FinishReason`."""
    preemptions: int = 0
    lost_tokens: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of the requests admitted (each once)."""
    generated_tokens: int = 0
    computed_tokens: int = 0
    """Tokens scheduled, recomputed ones included."""
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    resumed_cache_queries: int = 0
    resumed_cache_hits: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    wasted_tokens: int = 0
    """Tokens computed past an end that was found late (async scheduling)."""
    first_tokens: int = 0
    steps: int = 0
    external_cache_hits: int = 0
    """Those of the prefix cache hits whose KV a connector brought from elsewhere."""
    cache_evictions: int | None = None
    """Cached blocks given up for something else; None: not exported by this engine."""
    external_cache_queries: int = 0
    """Prompt tokens a connector was asked for: those not found here. 0 without a connector."""
    drafts: int = 0
    """Drafts verified, of one or more tokens each."""
    accepted_at: list[int] = []
    """Accepted draft tokens by their place in the draft."""


class Viewport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which rows a watcher wants: bounds what a snapshot costs, whatever waits."""

    running_rows: int = 64
    waiting_rows: int = 64
    running_offset: int = 0
    waiting_offset: int = 0
    id_contains: str = ""
    """Only rows whose id contains this text (`!text`: does not contain)."""
    sort: str = ""
    """Row field to sort by; empty = schedule order."""
    descending: bool = False
    kv_cells: int = 0
    """Cells wanted in the KV map; 0 = no map."""
    detail: str | None = None
    """A request whose block ids and lifeline are wanted."""


NO_ROWS = Viewport(running_rows=0, waiting_rows=0)
"""Of those who want the numbers only."""


class RequestDetail(msgspec.Struct, frozen=True, kw_only=True):
    """One request from close by. Block ids in order of the context."""

    request_id: str
    row: RequestRow
    block_ids: list[int]
    events: list[EngineCoreEvent]
    output_token_ids: list[int] = []


class KvMap(msgspec.Struct, frozen=True, kw_only=True):
    """The pool as a strip of cells, each `blocks_per_cell` consecutive block ids.

    `cells` holds one letter per cell, the first that applies to any of its blocks:
    `p` pending, `h` held, `s` shared, `u` in use, `c` cached (free, hashed), `.` free.
    `marks` are the cells that hold blocks of the `detail` request.
    """

    blocks_per_cell: int
    cells: str
    marks: list[int] = []


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The engine at one step boundary, cut to a viewport. Counts are exact whatever the viewport."""

    step: int
    mono: float
    wall: float
    generation: int
    """Number of knob changes so far; a change based on an older one is refused."""
    knobs: Knobs
    pause: PauseState
    num_running: int
    num_waiting: int
    """All that wait, deferred and preempted ones included."""
    num_deferred: int
    waiting_by_reason: dict[str, int]
    """`WaitReason` value -> requests; adds up to num_waiting."""
    pool: PoolUsage
    running: list[RequestRow]
    waiting: list[RequestRow]
    num_running_matched: int
    num_waiting_matched: int
    last_step: StepRecord | None
    counters: Counters
    recent_preemptions: list[Preemption]
    """The newest last."""
    last_step_mono: float | None = None
    """When the last step ended; with work pending, its age tells a stall."""
    kv_map: KvMap | None = None
    detail: RequestDetail | None = None
    is_scan_cut: bool = False
    """The viewport's filter or sort looked at the first `MAX_SCANNED` requests of a longer queue only."""
