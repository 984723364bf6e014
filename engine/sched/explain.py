"""Why things are as they are: for each waiting request its reason, in words and numbers; and the rows watchers see.

Reads the scheduler, changes nothing. What stopped a step was noted while it was planned, so nothing is guessed, and
counting the waiting by reason costs the same whether ten wait or a hundred thousand.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from heapq import merge
from itertools import islice
from operator import attrgetter
from typing import Any

from schedtop.engine.request import Request, State
from schedtop.engine.sched.interface import SchedulerInterface
from schedtop.engine.sched.plan import Blocked
from schedtop.engine.snapshot import MAX_SCANNED, PauseState, RequestRow, RequestStatus, Viewport, WaitReason

_STATUS: dict[State, RequestStatus] = {
    State.WAITING: RequestStatus.WAITING,
    State.DEFERRED: RequestStatus.DEFERRED,
    State.RUNNING: RequestStatus.RUNNING,
    State.PREEMPTED: RequestStatus.PREEMPTED,
}
_BLOCKS_THOSE_BEHIND = (WaitReason.KV_BLOCKS, WaitReason.WHOLE_PROMPT, WaitReason.ENCODER)


def waiting_by_reason(sched: SchedulerInterface) -> dict[str, int]:
    """Requests by `WaitReason` value; the counts add up to all that wait."""
    counts = Counter({reason.value: count for reason, count in sched.deferred_by_reason.items() if count})
    num_ready = len(sched.waiting)
    if not num_ready:
        return dict(counts)
    passed = passed_over(sched)
    counts.update(blocked.reason.value for blocked in passed)
    num_left = num_ready - len(passed)
    blocked = current_block(sched)
    if blocked.reason in _BLOCKS_THOSE_BEHIND:
        if blocked not in passed:
            counts[blocked.reason.value] += 1
            num_left -= 1
        counts[WaitReason.BEHIND.value] += num_left
    else:
        counts[blocked.reason.value] += num_left
    return {reason: count for reason, count in counts.items() if count}


def wait_reason(sched: SchedulerInterface, request: Request) -> tuple[WaitReason, str]:
    """Why a waiting request isn't running, and the numbers."""
    if request.defer_reason is not None:
        return request.defer_reason, _deferral_detail(request)
    blocked = current_block(sched)
    for passed in passed_over(sched):
        if passed.request is request:
            return passed.reason, _block_detail(sched, passed)
    if blocked.request is None or blocked.request is request:
        return blocked.reason, _block_detail(sched, blocked)
    if blocked.reason in _BLOCKS_THOSE_BEHIND:
        return WaitReason.BEHIND, f"behind {blocked.request.request_id}: {_block_detail(sched, blocked)}"
    return blocked.reason, _block_detail(sched, blocked)


def current_block(sched: SchedulerInterface) -> Blocked:
    """What stops admission as things stand: a pause, what stopped the last step, or nothing yet."""
    if sched.pause_state is not PauseState.RUNNING:
        return Blocked(WaitReason.PAUSED)
    plan = sched.last_plan
    blocked = plan.blocked if plan is not None else None
    if blocked is None or (blocked.request is not None and blocked.request not in sched.waiting):
        return Blocked(WaitReason.NOT_LOOKED_AT)
    return blocked


def passed_over(sched: SchedulerInterface) -> list[Blocked]:
    """With admission skip: who was blocked in the last step, and still waits, while others passed."""
    plan = sched.last_plan
    if plan is None or sched.pause_state is not PauseState.RUNNING:
        return []
    return [passed for passed in plan.passed_over if passed.request is not None and passed.request in sched.waiting]


def _block_detail(sched: SchedulerInterface, blocked: Blocked) -> str:
    match blocked.reason:
        case WaitReason.KV_BLOCKS:
            return _blocks_in_words(sched, blocked)
        case WaitReason.WHOLE_PROMPT:
            return f"its {blocked.needed} tokens don't fit the {blocked.free} left of the budget"
        case WaitReason.SEQUENCE_CAP:
            return f"{len(sched.running)} running, cap {sched.knobs.max_num_seqs}"
        case WaitReason.BUDGET:
            return f"budget of {sched.knobs.max_num_batched_tokens} tokens spent"
        case WaitReason.PAUSED:
            return f"engine paused ({sched.pause_state.value})"
        case _:
            return ""


def _blocks_in_words(sched: SchedulerInterface, blocked: Blocked) -> str:
    if blocked.needed > sched.kv.capacity:
        return f"needs {blocked.needed} blocks, kv_block_limit allows {sched.kv.capacity}"
    kept_back = " above the watermark" if sched.kv.watermark_blocks and sched.running else ""
    return f"needs {blocked.needed} blocks, {blocked.free} free{kept_back}"


def _deferral_detail(request: Request) -> str:
    if request.defer_reason is WaitReason.IN_FLIGHT:
        return f"a step in flight still computes for it ({request.num_output_placeholders} tokens to come)"
    if request.defer_reason is WaitReason.ADAPTER_SLOTS:
        return f"adapter {request.adapter}"
    return ""


# ---- rows ------------------------------------------------------------------------------------------------------


def in_schedule_order(sched: SchedulerInterface, place: int = 0) -> Iterator[Request]:
    """All that wait, deferred ones in their place; from a place on, without a walk through those before it."""
    num_ready = _num_ready_before(sched, place)
    ready, deferred = sched.waiting.islice(num_ready), sched.deferred.islice(place - num_ready)
    return merge(ready, deferred, key=lambda request: request.queue_key)


def _num_ready_before(sched: SchedulerInterface, place: int) -> int:
    """How many of the first `place` that wait are ready, the others deferred: halved, not counted."""
    ready, deferred = sched.waiting, sched.deferred
    low, high = max(0, place - len(deferred)), min(place, len(ready))
    while low < high:
        middle = (low + high) // 2
        if ready[middle].queue_key <= deferred[place - middle - 1].queue_key:
            low = middle + 1
        else:
            high = middle
    return low


def running_rows(sched: SchedulerInterface, view: Viewport) -> tuple[list[RequestRow], int, bool]:
    """The rows of a viewport, how many matched it, and whether the scan was cut."""
    everybody, total = partial(_from_place, sched.running), len(sched.running)
    chosen, matched, cut = _choose(everybody, total, view, view.running_offset, view.running_rows)
    return [request_row(sched, request) for _, request in chosen], matched, cut


def waiting_rows(sched: SchedulerInterface, view: Viewport) -> tuple[list[RequestRow], int, bool]:
    """As `running_rows`, with the place in schedule order and the reason."""
    order = partial(in_schedule_order, sched)
    chosen, matched, cut = _choose(order, sched.num_waiting, view, view.waiting_offset, view.waiting_rows)
    return [request_row(sched, request, position) for position, request in chosen], matched, cut


def _from_place(requests: Sequence[Request], place: int) -> Iterator[Request]:
    return islice(requests, place, None)


def _choose(
    from_place: Callable[[int], Iterator[Request]], total: int, view: Viewport, offset: int, count: int
) -> tuple[list[tuple[int, Request]], int, bool]:
    if not view.id_contains and not view.sort:
        return list(islice(enumerate(from_place(offset), offset), count)), total, False
    inverted = view.id_contains.startswith("!")
    text = view.id_contains.removeprefix("!")
    scanned = [
        (place, request)
        for place, request in islice(enumerate(from_place(0)), MAX_SCANNED)
        if not text or (text in request.request_id) != inverted
    ]
    if view.sort:
        value_of = _sort_value_of(view.sort)
        scanned.sort(key=lambda entry: value_of(entry[1]), reverse=view.descending)
    return scanned[offset : offset + count], len(scanned), total > MAX_SCANNED


_NEVER_NONE = frozenset(
    {
        "request_id", "priority", "arrived", "num_prompt_tokens", "num_output_tokens", "num_computed_tokens",
        "num_cached_tokens", "num_preemptions", "num_lost_tokens",
    }
)  # fmt: skip


def _sort_value_of(field: str) -> Callable[[Request], Any]:
    """What gives a request's value of a row field: chosen once, since thousands are asked. Without one: first."""
    match field:
        case "num_blocks":
            return lambda request: len(request.blocks)
        case "num_scheduled_tokens":
            return attrgetter("planned_tokens")
        case "max_tokens":
            return lambda request: request.max_total_tokens - request.num_prompt_tokens
        case "status":
            return lambda request: request.state.name
        case "wait_reason" | "wait_detail":  # those with one of their own; the others share the queue's
            return lambda request: request.defer_reason or ""
        case _ if field in _NEVER_NONE:
            return attrgetter(field)
    return lambda request: (getattr(request, field, None) is not None, getattr(request, field, None) or 0.0)


def status_of(request: Request) -> RequestStatus:
    """Where a live request stands, in the words watchers use."""
    return _STATUS[request.state]


def request_row(sched: SchedulerInterface, request: Request, position: int | None = None) -> RequestRow:
    """One request as a table shows it."""
    reason, detail = (None, "") if request.state is State.RUNNING else wait_reason(sched, request)
    is_in_last_step = request.planned_in == sched.step
    return RequestRow(
        request_id=request.request_id,
        status=status_of(request),
        priority=request.priority,
        arrived=request.arrived,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        max_tokens=request.max_total_tokens - request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_blocks=len(request.blocks),
        num_scheduled_tokens=request.planned_tokens if is_in_last_step else 0,
        num_preemptions=request.num_preemptions,
        num_lost_tokens=request.num_lost_tokens,
        first_token_at=request.first_token_at,
        last_token_at=request.last_token_at,
        position=position,
        wait_reason=reason,
        wait_detail=detail,
    )
