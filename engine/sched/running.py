"""Pass 1: running requests, in admission order, each given its share of the budget and blocks to hold it.

A request that can be given nothing is passed over, not stopped at. When blocks run out somebody is preempted until
the request fits or is itself the victim. Admission is not here (`waiting.py`).
"""

from typing import TYPE_CHECKING

from schedtop.engine.kv.block import KVCacheBlock
from schedtop.engine.request import Request
from schedtop.engine.sched.plan import Blocked, StepPlan
from schedtop.engine.sched.victim import choose_victim
from schedtop.engine.snapshot import FinishReason, WaitReason

if TYPE_CHECKING:
    from schedtop.engine.sched.scheduler import Scheduler


def schedule_running(sched: "Scheduler", plan: StepPlan) -> None:
    """Give every running request `min(gap, threshold, budget, model length)` tokens while the budget lasts.

    The loop is the engine's hottest: it keeps the plan's numbers in locals and calls out only where something
    happens (a block fills or is missing, a draft, a placeholder).
    """
    running = sched.running
    scheduled, requests = plan.num_scheduled_tokens, plan.requests
    threshold, step = plan.threshold, plan.step
    budget = plan.budget
    num_decodes = num_context = 0
    index = 0
    while budget > 0 and index < len(running):
        request = running[index]
        index += 1
        computed = request.num_computed_tokens
        num_new = len(request.token_ids) - computed
        if request.num_output_placeholders or request.spec_token_ids:
            num_new = gap_with_drafts(sched, request)
        is_decode = num_new == 1
        if 0 < threshold < num_new:
            num_new = threshold
        if num_new > budget:
            num_new = budget
        if request.media:
            num_new = sched.encoder.limit(request, computed, num_new)
        if num_new <= 0:
            continue
        end = computed + num_new
        if end > request.num_slots or end >= request.hash_at:
            plan.budget = budget
            if not secure_blocks(sched, plan, request, end):
                break
            budget = plan.budget
            if plan.preempted:
                index = running.index(request) + 1
        if request.spec_token_ids:
            take_drafts(plan, request, num_new)
        if request.media:
            sched.plan_media(plan, request, computed, num_new)
        scheduled[request.request_id] = num_new
        requests.append(request)
        request.num_computed_tokens = end
        request.planned_in = step
        request.planned_tokens = num_new
        budget -= num_new
        if is_decode:
            num_decodes += 1
            num_context += end
        else:
            plan.count_chunk(computed, num_new)
    else:
        plan.budget = budget
    plan.num_decode_tokens += num_decodes
    plan.num_context_tokens += num_context


def gap_with_drafts(sched: "Scheduler", request: Request) -> int:
    """The gap of a request with sampled tokens in flight or drafts to verify.

    0 when the tokens in flight are known to be its last: no step is spent past max_tokens.
    """
    num_pending = request.num_output_placeholders
    num_tokens = len(request.token_ids) + num_pending
    if num_pending and num_tokens >= request.max_total_tokens:
        return 0
    gap = num_tokens + len(request.spec_token_ids) - request.num_computed_tokens
    return min(gap, sched.max_model_len - 1 - request.num_computed_tokens)


def take_drafts(plan: StepPlan, request: Request, num_new: int) -> None:
    """Plan as many of the request's drafts as its share reaches; the others are dropped."""
    known = len(request.token_ids) + request.num_output_placeholders - request.num_computed_tokens
    drafts = request.spec_token_ids[: max(num_new - known, 0)]
    request.spec_token_ids = []
    if drafts:
        plan.spec_token_ids[request.request_id] = drafts
        plan.num_draft_tokens += len(drafts)


def secure_blocks(sched: "Scheduler", plan: StepPlan, request: Request, end: int) -> bool:
    """Get blocks for a context of `end` tokens, preempting until it works; False if the request itself had to go."""
    blocks: list[KVCacheBlock] | None
    while (blocks := sched.kv.grow(request, end)) is None:
        victim = choose_victim(sched.running, sched.knobs, sched.victim_rule)
        needed = sched.kv.num_blocks_missing(request, end)
        if victim is request:
            plan.blocked = Blocked(WaitReason.KV_BLOCKS, request, needed, sched.kv.num_free)
            if outgrew_pool(sched, request, end):
                return False
        sched.preempt(victim, beneficiary=request, plan=plan)
        if victim is request:
            return False
    if blocks:
        plan.new_block_ids[request.request_id] = [block.block_id for block in blocks]
    sched.kv.hash_full_blocks(request, end)
    return True


def outgrew_pool(sched: "Scheduler", request: Request, end: int) -> bool:
    """End a request that the whole pool can't hold any more, instead of throwing it out for ever."""
    needed, usable = sched.kv.blocks_for(end), sched.kv.pool.num_usable
    if not sched.config.ends_outgrown or needed <= usable:
        return False
    detail = (
        f"its context of {end} tokens needs {needed} KV blocks and the whole pool has {usable} "
        f"({sched.config.usable_tokens} tokens)"
    )
    sched.finish(request, FinishReason.CAPACITY, detail)
    return True
