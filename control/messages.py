"""Everything that crosses the control socket, grouped by receiver. Messages are msgpack maps tagged by `type`.

Rules: commands refuse unknown fields (a misspelt field must never be dropped silently); what the server publishes
ignores them, new fields go last and have defaults. What the engine itself publishes is declared in
`schedtop.engine.snapshot`; nothing here may import sockets, HTTP or screens.
"""

from typing import Any, Literal

import msgspec

from schedtop.control.measures import Latency, Peaks
from schedtop.engine.knobs import KnobSpec, KnobValue
from schedtop.engine.outputs import Touched
from schedtop.engine.perf import ModelShape
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.snapshot import EngineCoreEvent, FinishReason, Snapshot, StepRecord, Viewport

PROTOCOL_VERSION = 1


class _FromClient(msgspec.Struct, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of what a client sends."""


class _FromServer(msgspec.Struct, kw_only=True, tag=True):
    """Base of what the server sends: stamped as it leaves."""

    step: int = -1
    """The newest step the server knew of; -1 before the first."""
    mono: float = 0.0
    wall: float = 0.0


# ---- to the server: session ------------------------------------------------------------------------------------


class Hello(_FromClient):
    """First frame of a client."""

    protocol: int = PROTOCOL_VERSION
    client: str = "schedtop"
    """Who is speaking, for the audit log: tui, cli, gateway, playbook NAME, ..."""
    read_only: bool = False
    """Give up the right to change anything on this connection."""


class Subscribe(_FromClient):
    """Replace this connection's subscription: snapshots of `viewport` every `interval_s`, events and step records.

    Answered by `Ack`. `interval_s=None` ends the snapshots.
    """

    interval_s: float | None = 0.25
    viewport: Viewport = Viewport()
    events: bool = True
    steps: bool = True
    """Deliver the step records since the last snapshot with each snapshot."""


class GetSnapshot(_FromClient):
    """One snapshot, answered by `SnapshotReply`."""

    viewport: Viewport = Viewport()


class GetInfo(_FromClient):
    """The engine's identity, sizes and knob table again; answered by an `Ack` with `Welcome`'s fields as data.

    Besides: `clients`, how many of each name are connected, and `audit`, where the log is and why it can't be written.
    """


# ---- to the engine ---------------------------------------------------------------------------------------------


class AddRequest(_FromClient):
    """Submit a request; accepted or refused by the reply, then `TokenBatch`es to this connection.

    It is aborted when the connection goes away.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    adapter: str | None = None
    cache_salt: str | None = None
    parent: str = ""
    """The id that several sequences of one request share (`n` > 1): operations on it mean them all."""


class RequestFilter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests by property: all conditions given must hold; an empty filter matches nothing."""

    ids: list[str] = []
    id_prefix: str | None = None
    priority_at_least: int | None = None
    priority_at_most: int | None = None
    status: str | None = None
    submitted_by: str | None = None
    """A token's name, of requests that came through the gateway; else the name with which their client said hello."""


class AbortRequests(_FromClient):
    """End requests with reason abort."""

    select: RequestFilter
    reason: str = ""
    as_stop: bool = False
    """The front end found a stop string: the end counts as stop, not as abort."""


class SetPriority(_FromClient):
    """Give requests a new priority: lower runs first."""

    select: RequestFilter
    priority: int
    reason: str = ""


class PreemptRequests(_FromClient):
    """Throw running requests back to the waiting queue."""

    select: RequestFilter
    reason: str = ""


class HoldRequests(_FromClient):
    """Keep requests from being scheduled until released; a running one is preempted first."""

    select: RequestFilter
    reason: str = ""


class ReleaseRequests(_FromClient):
    """Undo a hold."""

    select: RequestFilter
    reason: str = ""


class SetMaxTokens(_FromClient):
    """Change how many tokens a live request may generate."""

    select: RequestFilter
    max_tokens: int
    reason: str = ""


class SetKnobs(_FromClient):
    """Change knobs, all or none, at the next step boundary. Answered by `KnobsAck`.

    `expect_generation`: refuse if knobs have changed since that generation. `confirm_within_s`: roll back by itself
    unless `ConfirmChange` comes in time. `dry_run`: same checks and reply, nothing applied. `lease_id`: undone with
    that lease, see `HoldLease`.
    """

    changes: dict[str, KnobValue]
    expect_generation: int | None = None
    dry_run: bool = False
    confirm_within_s: float | None = None
    reason: str = ""
    lease_id: str = ""


class ConfirmChange(_FromClient):
    """Keep a change made with `confirm_within_s`."""

    change_id: int


class UndoChange(_FromClient):
    """Roll a change back (the last one when None); refused if one of its knobs was changed since."""

    change_id: int | None = None
    reason: str = ""


class HoldLease(_FromClient):
    """Begin or renew a lease: what is done under `lease_id` is undone unless it is renewed or ended within `within_s`.

    The name is the client's own choice. Changes are undone newest first, each only if nobody has turned its knob since.
    """

    lease_id: str
    within_s: float
    reason: str = ""


class EndLease(_FromClient):
    """End a lease and keep what was done under it."""

    lease_id: str
    reason: str = ""


class Pause(_FromClient):
    """abort: end everything and stop; wait: let running requests end, admit nobody; keep: freeze as it is."""

    mode: Literal["abort", "wait", "keep"] = "keep"
    reason: str = ""
    lease_id: str = ""


class Resume(_FromClient):
    """Go on after a pause."""

    reason: str = ""


class Drain(_FromClient):
    """Admit nobody new, re-admit preempted requests, reply when nothing is left or `limit_s` has passed.

    Either way the engine stays so until `Resume`.
    """

    limit_s: float | None = None
    reason: str = ""
    lease_id: str = ""


class ResetPrefixCache(_FromClient):
    """Forget cached prefixes; `preempt_running` also those that running requests hold."""

    preempt_running: bool = False
    reason: str = ""


class SelfCheck(_FromClient):
    """Prove block and reference accounting on the live engine."""


class DumpSteps(_FromClient):
    """The last `count` step records."""

    count: int = 100


class GetStepModel(_FromClient):
    """The step-time model fitted from the steps so far; `data["fitted"]` is null before there are enough."""


class GetState(_FromClient):
    """Everything the scheduler's next decisions depend on, as `data["state"]`: what a forecast starts from."""


class GetAudit(_FromClient):
    """The newest audit rows, newest first."""

    limit: int = 100


class NoteRefusal(_FromClient):
    """Write into the audit log that this client refused somebody something: the gateway's 403s."""

    action: str
    detail: str


AnyCommand = (
    Subscribe | GetSnapshot | GetInfo | AddRequest | AbortRequests | SetPriority | PreemptRequests | HoldRequests
    | ReleaseRequests | SetMaxTokens | SetKnobs | ConfirmChange | UndoChange | HoldLease | EndLease | Pause
    | Resume | Drain | ResetPrefixCache | SelfCheck | DumpSteps | GetStepModel | GetState | GetAudit | NoteRefusal
)  # fmt: skip


class Envelope(_FromClient):
    """A command on its way: it gets exactly one reply, which echoes `id`, the client's own number."""

    id: int
    command: AnyCommand
    on_behalf_of: str = ""
    """For the audit log, when the client speaks for others: the gateway puts the token's name here, never the token."""


FromClient = Hello | Envelope


# ---- to the client ---------------------------------------------------------------------------------------------


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who the engine is and what it was started with."""

    name: str
    model: str
    boot_id: str
    """New at every start: a client that sees another one knows that live changes were lost."""
    pid: int
    version: str
    kind: str = "schedtop"
    """`schedtop` or `vllm`."""
    block_size: int = 16
    num_usable_blocks: int = 0
    max_model_len: int | None = None
    max_num_batched_tokens: int = 0
    max_num_seqs: int = 0
    backend: str = ""
    """Attention backend and device, in words."""
    started_wall: float = 0.0
    eos_token_ids: list[int] = []
    model_path: str = ""
    """Where the gateway finds tokenizer and chat template."""
    adapters: list[str] = []
    """Names that requests may give as their model to get the model with an adapter."""
    shape: ModelShape | None = None
    """Sizes of the model, for the arithmetic of `engine.perf`; None where there is no model or it isn't known."""


class Welcome(_FromServer):
    """Answer to `Hello`."""

    protocol: int
    info: EngineInfo
    knobs: list[KnobSpec]
    capabilities: list[str]
    """Command names this server takes."""
    read_only: bool = False


class Ack(_FromServer):
    """A command was carried out (or found to be so already)."""

    id: int
    applied_at_step: int
    found: str = ""
    """What the command found, in words: `paused (keep)`, ..."""
    did: str = ""
    touched: Touched | None = None
    data: dict[str, Any] = {}


class KnobsAck(_FromServer):
    """Receipt of `SetKnobs` and of undo: only the knobs named in it."""

    id: int
    applied_at_step: int
    change_id: int
    generation: int
    before: dict[str, KnobValue]
    after: dict[str, KnobValue]
    dry_run: bool = False
    confirm_by_mono: float | None = None
    warnings: list[str] = []


class ErrorReply(_FromServer):
    """A command was refused; the engine is as it was. `id` is None when the frame couldn't be read."""

    id: int | None
    code: str
    message: str


class SnapshotUpdate(_FromServer):
    """A snapshot of the subscription. `steps`: records since the last update (the newest if there were too many)."""

    snapshot: Snapshot
    latencies: dict[str, Latency] = {}
    """ttft, itl, e2e, queue, step."""
    steps: list[StepRecord] = []
    pending_change: "PendingChange | None" = None
    shutting_down: bool = False
    """The engine is ending: it takes no new requests and lets the running ones finish, up to its limit."""
    peaks: Peaks | None = None
    """Since this connection's last snapshot of the same kind (subscribed, or asked for); None: no step ended since."""


class PendingChange(msgspec.Struct, frozen=True, kw_only=True):
    """A change that will be undone unless confirmed."""

    change_id: int
    changes: dict[str, tuple[KnobValue, KnobValue]]
    rolls_back_at_mono: float
    actor: str


class SnapshotReply(_FromServer):
    """Answer to `GetSnapshot`."""

    id: int
    update: SnapshotUpdate


class EventBatch(_FromServer):
    """Events since the last batch, in order; `dropped` tells how many this client missed."""

    events: list[EngineCoreEvent]
    dropped: int = 0


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    detail: str = ""
    logprobs: list[list[tuple[int, float]]] | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[list[tuple[int, float]] | None] | None = None


class TokenBatch(_FromServer):
    """The tokens of this connection's requests from one step (or several, joined for a slow reader: its last)."""

    outputs: list[TokenOutput]


class Goodbye(_FromServer):
    """The server is about to close this connection, and why."""

    reason: str


Reply = Ack | KnobsAck | ErrorReply | SnapshotReply
FromServer = Welcome | Reply | SnapshotUpdate | EventBatch | TokenBatch | Goodbye
