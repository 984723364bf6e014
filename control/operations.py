"""Commands as calls on the engine: what each does at the step boundary, and in words what it found and did.

Everything here runs in the core thread, so it must be quick and must refuse whatever the engine couldn't bear.
Sessions, audit and confirmation are not here (`commands.py`).
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec

from schedtop.control.messages import (
    AbortRequests,
    AddRequest,
    AnyCommand,
    DumpSteps,
    GetState,
    HoldRequests,
    Pause,
    PreemptRequests,
    ReleaseRequests,
    RequestFilter,
    ResetPrefixCache,
    Resume,
    SelfCheck,
    SetMaxTokens,
    SetPriority,
)
from schedtop.engine.core import NUM_STEPS_KEPT, EngineCore
from schedtop.engine.errors import Conflict, SchedtopError
from schedtop.engine.outputs import Touched
from schedtop.engine.snapshot import NO_ROWS, FinishReason, PauseState, RequestRow, RequestStatus, Viewport, WaitReason

PRIORITY_LOW, PRIORITY_HIGH = -(1 << 31), (1 << 31) - 1
"""Priorities the engine's queue is meant for; lower runs first."""
MAX_VIEWPORT_ROWS = 1000
"""Rows of either queue in one snapshot: what a watcher may cost the engine and a slow reader the memory."""
MAX_OFFSET = 1 << 31

PAUSE_WORDS = {
    PauseState.RUNNING: "running",
    PauseState.PAUSED_NEW: "paused: admitting nobody new",
    PauseState.PAUSED_ALL: "paused: frozen",
}


class Outcome(msgspec.Struct, kw_only=True):
    """What an operation found and did. `before` and `after` are for the audit log."""

    found: str = ""
    did: str = ""
    touched: Touched | None = None
    data: dict[str, Any] = {}
    before: Any = None
    after: Any = None


class BadCommand(SchedtopError):
    """A command whose values make no sense, whatever the engine's state."""

    code = "bad_command"


Operation = Callable[[EngineCore], Outcome]


def operation_for(command: AnyCommand) -> Operation | None:
    """The operation of a command that the engine carries out in one boundary; None for those of the server."""
    match command:
        case AbortRequests():
            end = FinishReason.STOP if command.as_stop else FinishReason.ABORT
            return lambda core: _on_requests(core, command.select, "aborted", core.abort, command.reason, end)
        case SetPriority():
            check_priority(command.priority)
            verb = f"given priority {command.priority}"
            return lambda core: _on_requests(core, command.select, verb, core.set_priority, command.priority)
        case PreemptRequests():
            return lambda core: _on_requests(core, command.select, "preempted", core.preempt)
        case HoldRequests():
            return lambda core: _on_requests(core, command.select, "held", core.hold)
        case ReleaseRequests():
            return lambda core: _on_requests(core, command.select, "released", core.release)
        case SetMaxTokens():
            verb = f"given max_tokens {command.max_tokens}"
            return lambda core: _on_requests(core, command.select, verb, core.set_max_tokens, command.max_tokens)
        case Pause():
            return lambda core: _pause(core, command)
        case Resume():
            return _resume
        case ResetPrefixCache():
            return lambda core: _reset_prefix_cache(core, command.preempt_running)
        case SelfCheck():
            return _self_check
        case GetState():
            return lambda core: Outcome(data={"state": core.state()})
        case DumpSteps():
            check_range("count", command.count, 1, NUM_STEPS_KEPT)
            return lambda core: Outcome(data={"steps": core.recent_steps(command.count)})
        case _:
            return None


def check_priority(priority: int) -> None:
    """Raise `BadCommand` outside 32 bits."""
    if not PRIORITY_LOW <= priority <= PRIORITY_HIGH:
        raise BadCommand(f"priority={priority} is outside {PRIORITY_LOW} to {PRIORITY_HIGH} (lower runs first)")


def check_range(name: str, value: int, low: int, high: int) -> None:
    """Raise `BadCommand` naming the limits."""
    if not low <= value <= high:
        raise BadCommand(f"{name}={value} is outside its range {low} to {high}")


def check_viewport(view: Viewport) -> None:
    """Raise `BadCommand` for rows, offsets or a sort field that a snapshot can't have."""
    for name, high in (
        ("running_rows", MAX_VIEWPORT_ROWS),
        ("waiting_rows", MAX_VIEWPORT_ROWS),
        ("running_offset", MAX_OFFSET),
        ("waiting_offset", MAX_OFFSET),
        ("kv_cells", MAX_OFFSET),
    ):
        check_range(name, getattr(view, name), 0, high)
    if view.sort and view.sort not in RequestRow.__struct_fields__:
        raise BadCommand(f"sort={view.sort!r} is no field of a request: {', '.join(RequestRow.__struct_fields__)}")


def add_request(core: EngineCore, command: AddRequest, received: float) -> Outcome:
    """Submit; raises what the engine's door raises.

    `received` (`time.monotonic()`): when the command came. The wait for the step boundary belongs to the request's
    time to its first token.
    """
    core.add_request(
        command.request_id,
        command.prompt_token_ids,
        command.sampling,
        command.priority,
        command.adapter,
        command.cache_salt,
        arrived=core.clock() - (time.monotonic() - received),
    )
    return Outcome(did=f"queued {command.request_id}")


# ---- on requests ------------------------------------------------------------------------------------------------


def _on_requests(
    core: EngineCore, select: RequestFilter, verb: str, act: Callable[..., Touched], *arguments: Any
) -> Outcome:
    ids = matching(core, select)
    touched = act(ids, *arguments)
    return Outcome(
        found=_found_in_words(touched),
        did=f"{len(touched.changed)} {verb}" if touched.changed else f"nothing: none had to be {verb}",
        touched=touched,
        before={request_id: status.value for request_id, status in touched.found.items()},
        after=touched.changed,
    )


def matching(core: EngineCore, select: RequestFilter) -> list[str]:
    """Ids for which all conditions hold. Raises `BadCommand` for a status that doesn't exist, or an empty prefix."""
    if select.status is not None and select.status not in set(RequestStatus):
        raise BadCommand(f"status={select.status!r} is not one of {', '.join(RequestStatus)}")
    if select.id_prefix == "":
        raise BadCommand("id_prefix='' would match every request: give the first characters of the ids that are meant")
    if select.submitted_by is not None and not select.ids:
        return []  # the server names them: nobody's
    return core.match(select.ids, select.id_prefix, select.priority_at_least, select.priority_at_most, select.status)


def _found_in_words(touched: Touched) -> str:
    counts: dict[str, int] = {}
    for status in touched.found.values():
        counts[status.value] = counts.get(status.value, 0) + 1
    if touched.unknown:
        counts["not live"] = len(touched.unknown)
    return ", ".join(f"{count} {status}" for status, count in counts.items()) or "no request matches"


# ---- pause, cache, check ----------------------------------------------------------------------------------------


def _pause(core: EngineCore, command: Pause) -> Outcome:
    live = core.snapshot(NO_ROWS)
    found = core.pause(command.mode)
    after = pause_state(core)
    did = PAUSE_WORDS[after]
    if command.mode == "abort":
        did += f"; {live.num_running + live.num_waiting} aborted"
    elif found is after:
        did = f"nothing: it was {did} already"
    return Outcome(found=PAUSE_WORDS[found], did=did, before=found.value, after=after.value)


def _resume(core: EngineCore) -> Outcome:
    found = core.resume()
    did = "nothing: it was running already" if found is PauseState.RUNNING else "resumed"
    return Outcome(found=PAUSE_WORDS[found], did=did, before=found.value, after=PauseState.RUNNING.value)


def pause_state(core: EngineCore) -> PauseState:
    """Whether the engine is paused, and how."""
    return core.snapshot(NO_ROWS).pause


def _reset_prefix_cache(core: EngineCore, preempt_running: bool) -> Outcome:
    cached = core.snapshot(NO_ROWS).pool.cached
    if core.reset_prefix_cache(preempt_running):
        return Outcome(found=f"{cached} cached blocks", did="forgot them all", before=cached, after=0)
    raise Conflict(
        "nothing was forgotten: blocks are in use; wait until nothing runs, or preempt the running requests "
        "(preempt_running) and repeat if results were still in flight"
    )


def _self_check(core: EngineCore) -> Outcome:
    faults = core.self_check()
    did = f"found {len(faults)} faults" if faults else "block and reference accounting is sound"
    return Outcome(did=did, data={"faults": faults})


# ---- drain ------------------------------------------------------------------------------------------------------


def start_drain(core: EngineCore) -> Outcome:
    """Admit nobody new. Raises `Conflict` on a frozen engine: nothing would ever end."""
    found = pause_state(core)
    if found is PauseState.PAUSED_ALL and core.num_draining:
        raise Conflict(
            f"the engine is frozen by a pause with {core.num_draining} requests under way, which would never end; "
            "resume it first, or pause with mode abort"
        )
    num_left = core.start_drain()
    return Outcome(found=PAUSE_WORDS[found], data={"left": num_left}, before=found.value)


class DrainProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a drain is. `stopped`: why it won't go on; empty while it does."""

    num_left: int
    stopped: str = ""


def drain_progress(core: EngineCore) -> DrainProgress:
    """Requests under way, and whether they can still end."""
    num_left = core.num_draining
    snapshot = core.snapshot(NO_ROWS)
    num_held = snapshot.waiting_by_reason.get(WaitReason.HELD, 0)
    if snapshot.pause is not PauseState.PAUSED_NEW:
        return DrainProgress(num_left=num_left, stopped=f"the engine is {PAUSE_WORDS[snapshot.pause]} again")
    if num_left and not snapshot.num_running and num_left <= num_held:
        return DrainProgress(num_left=num_left, stopped="the rest is held by an operator; release or abort it")
    return DrainProgress(num_left=num_left)
