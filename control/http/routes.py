"""Which command hangs on which control path: one table, from which handlers and the OpenAPI document are made.

Reading is GET with query parameters; whatever changes something is POST or PATCH with a JSON body.
"""

from typing import NamedTuple

from schedtop.control.http.auth import Scope
from schedtop.control.messages import (
    AbortRequests,
    Ack,
    ConfirmChange,
    Drain,
    DumpSteps,
    EndLease,
    GetAudit,
    GetInfo,
    GetSnapshot,
    GetState,
    GetStepModel,
    HoldLease,
    HoldRequests,
    KnobsAck,
    Pause,
    PreemptRequests,
    ReleaseRequests,
    ResetPrefixCache,
    Resume,
    SelfCheck,
    SetKnobs,
    SetMaxTokens,
    SetPriority,
    SnapshotUpdate,
    UndoChange,
)
from schedtop.engine.snapshot import Viewport

PREFIX = "/control/v1"


class CommandRoute(NamedTuple):
    """A command with a path. Its fields are the body's (or the query's) fields."""

    method: str
    path: str
    scope: Scope
    command: type
    answer: type
    fields: type | None = None
    """Where the fields come from, if not from the command: a snapshot's query is its viewport."""
    waits: bool = False
    """The reply may take as long as the requests do."""


COMMAND_ROUTES = (
    CommandRoute("GET", f"{PREFIX}/info", Scope.READ, GetInfo, Ack),
    CommandRoute("GET", f"{PREFIX}/snapshot", Scope.READ, GetSnapshot, SnapshotUpdate, Viewport),
    CommandRoute("GET", f"{PREFIX}/steps", Scope.READ, DumpSteps, Ack),
    CommandRoute("GET", f"{PREFIX}/step-model", Scope.READ, GetStepModel, Ack),
    CommandRoute("GET", f"{PREFIX}/state", Scope.READ, GetState, Ack),
    CommandRoute("GET", f"{PREFIX}/audit", Scope.READ, GetAudit, Ack),
    CommandRoute("GET", f"{PREFIX}/self-check", Scope.READ, SelfCheck, Ack),
    CommandRoute("PATCH", f"{PREFIX}/knobs", Scope.CONTROL, SetKnobs, KnobsAck),
    CommandRoute("POST", f"{PREFIX}/knobs/confirm", Scope.CONTROL, ConfirmChange, Ack),
    CommandRoute("POST", f"{PREFIX}/knobs/undo", Scope.CONTROL, UndoChange, KnobsAck),
    CommandRoute("POST", f"{PREFIX}/leases", Scope.CONTROL, HoldLease, Ack),
    CommandRoute("POST", f"{PREFIX}/leases/end", Scope.CONTROL, EndLease, Ack),
    CommandRoute("POST", f"{PREFIX}/requests/abort", Scope.CONTROL, AbortRequests, Ack),
    CommandRoute("POST", f"{PREFIX}/requests/priority", Scope.CONTROL, SetPriority, Ack),
    CommandRoute("POST", f"{PREFIX}/requests/preempt", Scope.CONTROL, PreemptRequests, Ack),
    CommandRoute("POST", f"{PREFIX}/requests/hold", Scope.CONTROL, HoldRequests, Ack),
    CommandRoute("POST", f"{PREFIX}/requests/release", Scope.CONTROL, ReleaseRequests, Ack),
    CommandRoute("POST", f"{PREFIX}/requests/max-tokens", Scope.CONTROL, SetMaxTokens, Ack),
    CommandRoute("POST", f"{PREFIX}/pause", Scope.CONTROL, Pause, Ack),
    CommandRoute("POST", f"{PREFIX}/resume", Scope.CONTROL, Resume, Ack),
    CommandRoute("POST", f"{PREFIX}/drain", Scope.CONTROL, Drain, Ack, waits=True),
    CommandRoute("POST", f"{PREFIX}/reset-prefix-cache", Scope.CONTROL, ResetPrefixCache, Ack),
)
