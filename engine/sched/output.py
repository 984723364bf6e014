"""What a planned step tells the runner, and what the runner tells back. Neither leaves the process."""

from dataclasses import dataclass, field

import msgspec

from schedtop.engine.encoder.cache import MediaItem
from schedtop.engine.kv.connector.base import KVConnectorMetadata
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.structured.backend import CompiledGrammar

UNKNOWN_DRAFT = -1
"""Stands for a draft that the runner will propose itself when the step runs."""


class NewRequestData(msgspec.Struct, kw_only=True):
    """A request the runner sees for the first time, or again after a preemption: everything it needs."""

    req_id: str
    token_ids: list[int]
    """Prompt, and outputs so far when resumed. A copy: the runner appends what it samples."""
    num_prompt_tokens: int
    sampling_params: SamplingParams
    block_ids: list[int]
    num_computed_tokens: int
    adapter: str | None = None
    media: tuple[MediaItem, ...] = ()
    grammar: CompiledGrammar | None = None


@dataclass(slots=True)
class CachedRequestData:
    """What changed for requests the runner knows. It advances their `num_computed_tokens` by itself:
    plus what was scheduled, minus the drafts it rejected."""

    new_block_ids: dict[str, list[int]] = field(default_factory=dict)


@dataclass(slots=True)
class SchedulerOutput:
    """One planned step. `num_scheduled_tokens` is in schedule order and never holds a zero."""

    step: int
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict[str, list[int]]
    """Draft tokens to verify: part of the request's scheduled tokens, at their end."""
    preempted_req_ids: list[str]
    finished_req_ids: list[str]
    """Requests gone since the last step: the runner drops their state."""
    resumed_req_ids: list[str]
    num_context_tokens: int = 0
    """Context tokens attended to, summed over the scheduled tokens: each attends to itself and all before it."""
    encoder_inputs: dict[str, list[MediaItem]] = field(default_factory=dict)
    """Media to encode before the forward pass, by request."""
    freed_media: list[str] = field(default_factory=list)
    """Content hashes of embeddings to free, before any is computed."""
    kv_connector_metadata: KVConnectorMetadata | None = None
    """Blocks to load and to save around the forward pass."""


@dataclass(slots=True)
class ModelRunnerOutput:
    """A step's result, aligned with `SchedulerOutput.num_scheduled_tokens`.

    `sampled_token_ids[i]` is empty while request i is still in prefill; otherwise the accepted drafts and one more.
    `logprobs` maps a request id to one entry per sampled token: [(token id, log-probability), ...], the sampled first.
    """

    sampled_token_ids: list[list[int]]
    logprobs: dict[str, list[list[tuple[int, float]]]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[list[tuple[int, float]] | None]] = field(default_factory=dict)
    """Of requests that asked, in the step that completes their prompt: one entry per prompt token, shaped as above;
    None for the first token and for those found in the prefix cache."""
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    finished_loads: dict[str, bool] = field(default_factory=dict)
    """Connector loads that have ended: request id -> whether all blocks arrived."""
    finished_sends: list[str] = field(default_factory=list)
