"""Pass 1: running requests, in admission order, each given its share of the budget and blocks to hold it.

A request that can be given nothing is passed over, not stopped at. When blocks run out somebody is preempted until
the request fits or is itself the victim. Admission is not here (`waiting.py`).
"""

from typing import TYPE_CHECKING

from schedtop.engine.kv.block import KVCacheBlock
from schedtop.engine.request import NEVER, Request, State
from schedtop.engine.sched.plan import Blocked, StepPlan
from schedtop.engine.sched.planning import plan_media
from schedtop.engine.sched.victim import choose_victim
from schedtop.engine.snapshot import FinishReason, WaitReason

if TYPE_CHECKING:
    from schedtop.engine.sched.scheduler import Scheduler


def schedule_running(sched: "Scheduler", plan: StepPlan) -> None:
    """Give every running request `min(gap, threshold, budget, model length)` tokens while the budget lasts.

    The loop is the engine's hottest: it keeps the plan's numbers in locals and calls out only where something
    happens (a prompt chunk, a draft, a block that fills or is missing). A plain decode stays in it.
    """
    scheduled, requests, preempted = plan.num_scheduled_tokens, plan.requests, plan.preempted
    step, budget = plan.step, plan.budget
    longest = sched.config.usable_tokens if sched.config.ends_outgrown else NEVER
    num_decodes = num_context = 0
    for request in sched.running.copy():
        if budget <= 0:
            break
        if preempted and request.state is not State.RUNNING:
            continue  # thrown out a moment ago
        computed = request.num_computed_tokens
        num_pending = request.num_output_placeholders
        num_known = len(request.token_ids) + num_pending
        has_extras = request.spec_token_ids or request.media
        if num_pending and num_known >= request.max_total_tokens and not request.spec_token_ids:
            continue  # what is in flight is its last
        gap = num_known - computed
        num_new = gap if gap == 1 and not has_extras else share_of(sched, plan, request, gap, budget)
        if num_new <= 0:
            continue
        end = computed + num_new
        if end > request.num_slots:
            if end > longest:
                end_outgrown(sched, request, end)
                continue
            plan.budget = budget
            if not secure_blocks(sched, plan, request, end):
                budget = plan.budget
                break
            budget = plan.budget
        if end >= request.hash_at:
            sched.kv.hash_full_blocks(request, end)
        if has_extras:
            take_extras(sched, plan, request, num_new)
        scheduled[request.request_id] = num_new
        requests.append(request)
        request.num_computed_tokens = end
        request.planned_in = step
        request.planned_tokens = num_new
        budget -= num_new
        if num_new == gap == 1:
            num_decodes += 1
            num_context += end
        else:
            plan.count_chunk(computed, num_new, is_decode=gap == 1)
    plan.budget = budget
    plan.num_decode_tokens += num_decodes
    plan.num_context_tokens += num_context


def share_of(sched: "Scheduler", plan: StepPlan, request: Request, gap: int, budget: int) -> int:
    """Tokens for a request with a gap of known tokens, and perhaps drafts or media."""
    computed = request.num_computed_tokens
    if request.spec_token_ids:
        if request.num_output_placeholders and len(request.token_ids) + 1 >= request.max_total_tokens:
            return 0  # even if every draft in flight is rejected, its last token is on its way
        longest = max(computed + gap, sched.kv.capacity * sched.kv.block_size)  # no draft outgrows the pool
        gap = min(gap + len(request.spec_token_ids), min(sched.max_model_len - 1, longest) - computed)
    num_new = min(gap, plan.threshold or gap, budget)
    return sched.encoder.limit(request, computed, num_new) if request.media else num_new


def take_extras(sched: "Scheduler", plan: StepPlan, request: Request, num_new: int) -> None:
    """What a share of `num_new` tokens takes along besides known tokens: drafts and media."""
    if request.spec_token_ids:
        take_drafts(plan, request, num_new)
    if request.media:
        plan_media(sched, plan, request, request.num_computed_tokens, num_new)


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
        sched.preempt(victim, beneficiary=request, plan=plan)
        if victim is request:
            return False
    if blocks:
        plan.new_block_ids[request.request_id] = [block.block_id for block in blocks]
    return True


def end_outgrown(sched: "Scheduler", request: Request, end: int) -> None:
    """End a request that the whole pool can't hold any more, instead of throwing it out for ever.

    A token still in flight is waited for: it may be its last, and it is the client's.
    """
    if request.num_output_placeholders:
        return
    needed, usable = sched.kv.blocks_for(end), sched.kv.pool.num_usable
    detail = (
        f"its context of {end} tokens needs {needed} KV blocks and the whole pool has {usable} "
        f"({sched.config.usable_tokens} tokens)"
    )
    sched.finish(request, FinishReason.CAPACITY, detail)
