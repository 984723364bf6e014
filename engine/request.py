"""A live request as the scheduler sees it. Only the core thread touches it; watchers get `RequestRow`s."""

from collections.abc import Iterable
from enum import Enum, auto

from schedtop.engine.encoder.cache import MediaItem
from schedtop.engine.kv.block import KVCacheBlock
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.snapshot import EngineCoreEvent, FinishReason, WaitReason
from schedtop.engine.structured.backend import CompiledGrammar

NEVER = 1 << 62
"""A token count that is never reached."""


class State(Enum):
    """Where a request stands: Waiting -> Running -> Finished; Waiting <-> Deferred; Running -> Preempted -> Running."""

    WAITING = auto()
    DEFERRED = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


class Request:
    """Tokens, what of them is computed, and the blocks that hold it.

    `token_ids` holds prompt and output. `num_computed_tokens` counts tokens whose KV is computed or planned:
    it advances when work is scheduled. `num_output_placeholders` counts sampled tokens still in flight.
    """

    __slots__ = (
        "adapter",
        "arrival_time",
        "arrived",
        "block_hashes",
        "blocks",
        "cache_salt",
        "defer_reason",
        "events",
        "fcfs_rank",
        "finish_detail",
        "finish_reason",
        "first_token_at",
        "grammar",
        "hash_at",
        "is_held",
        "is_loaded",
        "last_token_at",
        "max_total_tokens",
        "media",
        "num_bypassed",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_external_tokens",
        "num_hashed_blocks",
        "num_lost_tokens",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_slots",
        "planned_in",
        "planned_tokens",
        "prefill_end",
        "priority",
        "queue_key",
        "request_id",
        "sampling",
        "skips_connector",
        "spec_token_ids",
        "state",
        "stop_token_ids",
        "token_ids",
        "was_admitted",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Iterable[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        arrival_time: float = 0.0,
        eos_token_ids: Iterable[int] = (),
        adapter: str | None = None,
        cache_salt: str | None = None,
        media: Iterable[MediaItem] = (),
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.sampling = sampling
        self.priority = priority
        self.arrival_time = arrival_time
        """Tie-break of policy priority, seconds."""
        self.arrived = arrival_time
        """Engine clock at arrival, seconds: where latencies start."""
        self.adapter = adapter
        self.cache_salt = cache_salt
        stops = frozenset(sampling.stop_token_ids)
        self.stop_token_ids = stops if sampling.ignore_eos else stops | frozenset(eos_token_ids)
        self.max_total_tokens = self.num_prompt_tokens + sampling.max_tokens
        """Prompt + output tokens at which it ends by length (max_model_len included)."""

        self.state = State.WAITING
        self.defer_reason: WaitReason | None = None
        self.is_held = False
        """An operator keeps it from being scheduled."""
        self.finish_reason: FinishReason | None = None
        self.finish_detail = ""
        self.fcfs_rank = 0
        self.queue_key: tuple[object, ...] = ()
        self.num_bypassed = 0
        """How many requests have passed it while it was blocked (admission skip)."""

        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.spec_token_ids: list[int] = []
        self.blocks: list[KVCacheBlock] = []
        self.num_slots = 0
        """Tokens its blocks have room for."""
        self.block_hashes: list[bytes] = []
        self.num_hashed_blocks = 0
        self.hash_at = NEVER
        """num_computed_tokens at which its next block is full and can be hashed."""
        self.planned_in = 0
        """Last step in which it was given tokens ..."""
        self.planned_tokens = 0
        """... and how many."""
        self.prefill_end = 0
        """Tokens it had when it was last admitted: until they are computed it is in prefill."""

        self.num_preemptions = 0
        self.num_lost_tokens = 0
        self.num_cached_tokens = 0
        self.num_external_tokens = 0
        """Computed tokens whose KV a connector brought; 0 again when they are thrown away."""
        self.was_admitted = False
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.events: list[EngineCoreEvent] = []
        self.grammar: CompiledGrammar | None = None
        self.media = tuple(media)
        self.is_loaded = False
        """Waits with KV that a connector has loaded: it holds blocks, so it is admitted before all others."""
        self.skips_connector = False
        """A load failed: compute the whole prompt here."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Output tokens known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The output so far, a copy."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def final_length(self) -> int:
        """Tokens of context when it ends by length: its last token is never computed."""
        return self.max_total_tokens - 1

    @property
    def is_finished(self) -> bool:
        """Whether it has left the scheduler."""
        return self.state is State.FINISHED

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.state.name.lower()}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens}, blocks={len(self.blocks)})"
        )
