"""What the engine hands out besides snapshots: tokens, results of operations, and the knob change's receipt."""

from dataclasses import dataclass, field

import msgspec

from schedtop.engine.knobs import KnobValue
from schedtop.engine.snapshot import EngineCoreEvent, FinishReason, RequestStatus, StepRecord

TokenLogprobs = list[tuple[int, float]]


class RequestOutput(msgspec.Struct, gc=False):
    """New tokens of one request, and its end if it ended. Token ids in order of generation."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    detail: str = ""
    """With an error or capacity end: what happened, with the numbers."""
    logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Of a request that asked, with its first tokens: one entry per prompt token, None where none was computed."""


@dataclass(slots=True)
class EngineCoreOutputs:
    """All that one step (or one boundary) produced, handed over at once."""

    step: int
    outputs: list[RequestOutput] = field(default_factory=list)
    events: list[EngineCoreEvent] = field(default_factory=list)
    record: StepRecord | None = None
    """None when only the boundary did something (an abort on an idle engine)."""


class KnobChange(msgspec.Struct, frozen=True, kw_only=True):
    """Receipt of a knob change: only the knobs named in it."""

    generation: int
    before: dict[str, KnobValue]
    after: dict[str, KnobValue]
    warnings: list[str] = []


class Touched(msgspec.Struct, frozen=True, kw_only=True):
    """What an operation on requests found and did."""

    found: dict[str, RequestStatus]
    """The matching live requests and the status each was found in."""
    unknown: list[str] = []
    """Ids asked for that aren't live."""
    changed: list[str] = []
    """Those that the operation changed; the others were already so."""
