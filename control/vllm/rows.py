"""vLLM's requests, queue and pool as the rows and counts that watchers see. Reads only."""

import heapq
from collections import Counter
from collections.abc import Iterator
from typing import Any

from vllm.v1.request import RequestStatus as VllmStatus

from schedtop.control.vllm.watch import Books, Watched
from schedtop.engine.config import EngineConfig
from schedtop.engine.snapshot import (
    KvMap,
    LimitedBy,
    PauseState,
    PoolUsage,
    RequestRow,
    RequestStatus,
    WaitReason,
)

MAX_CELLS = 4096
MAX_LOOKED_AT = 8192
"""Blocks looked at for a map: a pool of a large GPU has some 100,000, and this is the engine's thread."""
MAX_SORTED = 1000
"""Waiting requests shown under policy priority: the heap is cut, never walked in order."""
_DEFERRED = {
    VllmStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: WaitReason.GRAMMAR,
    VllmStatus.WAITING_FOR_REMOTE_KVS: WaitReason.KV_TRANSFER,
    VllmStatus.WAITING_FOR_STREAMING_REQ: WaitReason.NOT_LOOKED_AT,
}
_LIMITS = {
    LimitedBy.BUDGET: WaitReason.BUDGET,
    LimitedBy.SEQUENCES: WaitReason.SEQUENCE_CAP,
    LimitedBy.BLOCKS: WaitReason.KV_BLOCKS,
    LimitedBy.PAUSED: WaitReason.PAUSED,
}


def queues(scheduler: Any) -> list[Any]:
    """vLLM's queues in the order in which it looks at them."""
    return [queue for name in ("kv_holding_waiting", "waiting") if (queue := getattr(scheduler, name, None))]


def num_waiting(scheduler: Any) -> int:
    """Requests in vLLM's queues."""
    return len(scheduler.waiting) + len(getattr(scheduler, "kv_holding_waiting", ()))


def num_aside(scheduler: Any) -> int:
    """Requests in the queues that vLLM has set aside for something else than room."""
    return len(getattr(scheduler, "deferred_waiting", ()))


def in_schedule_order(queue: Any) -> Iterator[Any]:
    """A queue's requests in order; of a priority heap the first `MAX_SORTED`."""
    heap = getattr(queue, "_heap", None)
    return iter(heapq.nsmallest(MAX_SORTED, heap)) if heap is not None else iter(queue)


def unordered(queue: Any) -> Iterator[Any]:
    """All of a queue's requests. Iterating vLLM's priority queue itself would pop a copy of it."""
    heap = getattr(queue, "_heap", None)
    return iter(queue if heap is None else heap)


def row_status(request: Any, held: set[str]) -> RequestStatus:
    """Where a request stands, in our words."""
    if request.status == VllmStatus.RUNNING:
        return RequestStatus.RUNNING
    if request.request_id in held or request.status in _DEFERRED:
        return RequestStatus.DEFERRED
    return RequestStatus.PREEMPTED if request.status == VllmStatus.PREEMPTED else RequestStatus.WAITING


def wait_reason(request: Any, held: set[str], pause: PauseState, limit: LimitedBy, is_head: bool) -> WaitReason:
    """Why a request waits: its own state first, then what stopped the last step."""
    if request.request_id in held:
        return WaitReason.HELD
    if request.status in _DEFERRED:
        return _DEFERRED[request.status]
    if pause is not PauseState.RUNNING:
        return WaitReason.PAUSED
    reason = _LIMITS.get(limit, WaitReason.NOT_LOOKED_AT)
    return WaitReason.BEHIND if reason is WaitReason.KV_BLOCKS and not is_head else reason


def waiting_by_reason(scheduler: Any, held: set[str], pause: PauseState, limit: LimitedBy) -> dict[str, int]:
    """Counts that add up to all that wait. Deferred requests are counted one by one, the others as one."""
    counts: Counter[str] = Counter()
    num_deferred = 0
    for request in getattr(scheduler, "deferred_waiting", ()):
        counts[wait_reason(request, held, pause, limit, is_head=False).value] += 1
        num_deferred += 1
    num_ready = num_waiting(scheduler) - num_deferred
    if num_ready > 0:
        reason = WaitReason.PAUSED if pause is not PauseState.RUNNING else _LIMITS.get(limit, WaitReason.NOT_LOOKED_AT)
        num_heads = 1 if reason is WaitReason.KV_BLOCKS else num_ready
        counts[reason.value] += num_heads
        if num_ready > num_heads:
            counts[WaitReason.BEHIND.value] += num_ready - num_heads
    return dict(counts)


def request_row(
    scheduler: Any, request: Any, watched: Watched | None, held: set[str], books: Books, position: int | None,
    pause: PauseState,
) -> RequestRow:  # fmt: skip
    """One request as a table shows it."""
    status = row_status(request, held)
    reason = None
    if status is not RequestStatus.RUNNING:
        reason = wait_reason(request, held, pause, books.last_limit, is_head=position == 0)
    detail = ""
    if request.priority and getattr(getattr(scheduler, "policy", None), "value", "") == "fcfs":
        detail = "priority has no effect under policy fcfs"
    return RequestRow(
        request_id=request.request_id,
        status=status,
        priority=request.priority,
        arrived=watched.arrived if watched else 0.0,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        max_tokens=request.max_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_cached_tokens=watched.num_cached if watched else 0,
        num_blocks=num_blocks(scheduler, request),
        num_scheduled_tokens=books.scheduled.get(request.request_id, 0),
        num_preemptions=request.num_preemptions,
        num_lost_tokens=watched.num_lost if watched else 0,
        first_token_at=watched.first_token_at if watched else None,
        last_token_at=books.last_token_at(request.request_id),
        position=position,
        wait_reason=reason,
        wait_detail=detail,
    )


def num_blocks(scheduler: Any, request: Any) -> int:
    """Blocks a request holds in the first KV cache group."""
    return len(scheduler.kv_cache_manager.get_blocks(request.request_id).blocks[0])


def pool_usage(scheduler: Any, config: EngineConfig) -> PoolUsage:
    """Blocks by use; vLLM's null block isn't usable."""
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    pending = sum(len(blocks) for _, blocks in getattr(scheduler, "deferred_frees", ()))
    return PoolUsage(
        usable=config.num_usable_blocks,
        free=free,
        in_use=config.num_usable_blocks - free - pending,
        pending=pending,
        block_size=config.block_size,
    )


def kv_map(scheduler: Any, num_cells: int, marked: Any | None) -> KvMap | None:
    """The pool as a strip of cells; see `KvMap`. Of a large pool so many blocks are looked at as cost a millisecond."""
    blocks = getattr(scheduler.kv_cache_manager.block_pool, "blocks", None)
    if blocks is None:
        return None
    blocks = blocks[1:]  # the first is vLLM's null block
    per_cell = max(1, -(-len(blocks) // min(num_cells, MAX_CELLS)))
    stride = max(1, min(per_cell, len(blocks) // MAX_LOOKED_AT))
    cells = [
        max(map(_letter, blocks[start : start + per_cell : stride]), key=".cus".index)
        for start in range(0, len(blocks), per_cell)
    ]
    marks: list[int] = []
    if marked is not None:
        ids = scheduler.kv_cache_manager.get_blocks(marked.request_id).get_block_ids()[0]
        marks = sorted({(block_id - 1) // per_cell for block_id in ids})
    return KvMap(blocks_per_cell=per_cell, cells="".join(cells), marks=marks)


def _letter(block: Any) -> str:
    if block.ref_cnt:
        return "s" if block.ref_cnt > 1 else "u"
    return "c" if block.block_hash is not None else "."
