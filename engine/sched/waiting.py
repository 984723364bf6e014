"""Pass 2: waiting requests, admitted in queue order while budget, sequence slots and blocks last.

Runs only if nobody was preempted in pass 1 and admission isn't paused. The first request that doesn't fit stops
admission (strict head of line) unless the operator chose `admission=skip`. Requests that aren't ready are not in the
queue at all (`Scheduler.deferred`), so they hold up nobody.
"""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from schedtop.engine.knobs import AdmissionRule, SchedulingPolicy
from schedtop.engine.kv.block import KVCacheBlock
from schedtop.engine.request import Request
from schedtop.engine.sched.plan import Admission, Blocked, StepPlan
from schedtop.engine.sched.planning import plan_media
from schedtop.engine.sched.running import end_outgrown
from schedtop.engine.sched.transfers import reclaim_loaded
from schedtop.engine.snapshot import WaitReason

if TYPE_CHECKING:
    from schedtop.engine.sched.scheduler import Scheduler

MAX_LOOKAHEAD = 64
"""With admission skip: how many blocked requests one step looks past, so that a step's cost stays bounded."""


def admit_waiting(sched: "Scheduler", plan: StepPlan) -> None:
    """Admit requests until something stops it; `plan.blocked` then says what."""
    for request in candidates(sched):
        if plan.budget <= 0:
            plan.blocked = Blocked(WaitReason.BUDGET)
            return
        if len(sched.running) >= sched.knobs.max_num_seqs and not evict_for(sched, plan, request):
            plan.blocked = Blocked(WaitReason.SEQUENCE_CAP)
            return
        if not may_pass(sched, plan):
            break
        blocked = try_admit(sched, plan, request)
        while blocked and eviction_helps(sched, blocked) and evict_for(sched, plan, request):
            blocked = try_admit(sched, plan, request)
        if blocked and not pass_over(sched, plan, blocked):
            plan.blocked = plan.passed_over[0] if plan.passed_over else blocked
            return
    if plan.passed_over:
        plan.blocked = plan.passed_over[0]


def candidates(sched: "Scheduler") -> Iterator[Request]:
    """The requests to look at, in order. While a pause admits nobody new, only those that were already running."""
    if not sched.admits_new:
        yield from sorted(sched.preempted_waiting(), key=lambda request: request.queue_key)
        return
    place = 0
    while place < len(sched.waiting):
        request = next(sched.waiting.islice(place, place + 1))
        yield request
        if request in sched.waiting:  # looked at and left: it was passed over
            place += 1


def try_admit(sched: "Scheduler", plan: StepPlan, request: Request) -> Blocked | None:
    """Admit one request with its first share, or say what it lacks. None also when it was deferred, or ended."""
    if len(request.token_ids) > sched.config.usable_tokens and sched.config.ends_outgrown:
        end_outgrown(sched, request, len(request.token_ids))
        return None
    if not sched.adapters.admits(request, sched.knobs.max_bypass):
        sched.defer(request, WaitReason.ADAPTER_SLOTS)
        return None
    hits = [] if request.is_loaded else sched.kv.find_prefix(request)
    num_hit_tokens = request.num_computed_tokens or len(hits) * sched.kv.block_size
    num_external = num_loadable(sched, request, num_hit_tokens)
    if num_external is None:
        sched.defer(request, WaitReason.KV_TRANSFER)
        return None
    if num_external:
        return start_load(sched, request, hits, num_hit_tokens + num_external)
    num_left = len(request.token_ids) - num_hit_tokens
    num_new = min(num_left, plan.threshold) if plan.threshold else num_left
    if num_new > plan.budget and not sched.knobs.enable_chunked_prefill:
        return Blocked(WaitReason.WHOLE_PROMPT, request, num_new, plan.budget)
    num_new = min(num_new, plan.budget, sched.max_model_len - 1 - num_hit_tokens)
    if request.media and not (num_new := sched.encoder.limit(request, num_hit_tokens, num_new)):
        return Blocked(WaitReason.ENCODER, request)
    num_padding = draft_padding(sched, plan, num_left, num_hit_tokens)
    if num_new + num_padding > plan.budget:
        return Blocked(WaitReason.BUDGET, request, num_new + num_padding, plan.budget)
    end = num_hit_tokens + num_new + num_padding
    if (blocked := lacks_blocks(sched, request, end, hits)) is not None:
        return blocked
    admit(sched, plan, request, hits, num_hit_tokens, end, num_padding)
    return None


def num_loadable(sched: "Scheduler", request: Request, num_hit_tokens: int) -> int | None:
    """Tokens whose KV a connector can bring, in whole blocks, at least one token being left to compute.

    None: the connector doesn't know yet.
    """
    if request.is_loaded or request.skips_connector:
        return 0
    num_external = sched.connector.get_num_new_matched_tokens(request, num_hit_tokens)
    if num_external is None:
        return None
    size = sched.kv.block_size
    most = (len(request.token_ids) - 1) // size * size - num_hit_tokens
    return max(0, min(num_external // size * size, most))


def start_load(sched: "Scheduler", request: Request, hits: list[KVCacheBlock], end: int) -> Blocked | None:
    """Give a request blocks for `end` tokens and let a connector fill them; it waits aside until they are there."""
    if (blocked := lacks_blocks(sched, request, end, hits)) is not None:
        return blocked
    kv = sched.kv
    num_hit_tokens = len(hits) * kv.block_size
    kv.adopt(request, hits)
    new_blocks = kv.grow(request, end)
    assert new_blocks is not None, "admission was checked"
    sched.connector.update_state_after_alloc(request, [block.block_id for block in new_blocks], num_hit_tokens)
    request.num_external_tokens = end - num_hit_tokens
    kv.hold_for_load(request)
    sched.defer(request, WaitReason.KV_TRANSFER)
    return None


def draft_padding(sched: "Scheduler", plan: StepPlan, num_left: int, num_computed: int) -> int:
    """Placeholder drafts for a request that joins with a single token: rows of equal length while all decode.

    None beside a running request still in prefill, nor past the model's length, nor what no step could ever hold.
    """
    num_drafts = sched.knobs.num_speculative_tokens
    if num_left != 1 or not num_drafts or not sched.config.pads_drafts:
        return 0
    ran_before = plan.requests[: len(plan.requests) - len(plan.admissions)]
    if any(other.num_computed_tokens - other.planned_tokens < other.prefill_end for other in ran_before):
        return 0
    end = num_computed + 1 + num_drafts
    if end >= sched.max_model_len or not (ran_before or num_computed):
        return 0
    fits_alone = 1 + num_drafts <= plan.initial_budget and sched.kv.blocks_for(end) <= sched.kv.capacity
    return num_drafts if fits_alone or sched.config.padding_may_block else 0


def lacks_blocks(sched: "Scheduler", request: Request, end: int, hits: list[KVCacheBlock]) -> Blocked | None:
    """Whether the blocks for the first share, and for what is reserved, are missing above the watermark.

    Who has been preempted `max_preemptions` times is admitted only where it can run to its end, so that the cap holds.
    """
    kv, knobs = sched.kv, sched.knobs
    num_tokens = end
    if knobs.reserve_full_prompt:
        num_tokens = max(num_tokens, min(len(request.token_ids), sched.max_model_len))
    needed = kv.num_blocks_missing(request, num_tokens, hits)
    free = kv.num_free
    if sched.running:
        free -= kv.watermark_blocks
    if knobs.reserve_output or 0 < knobs.max_preemptions <= request.num_preemptions:
        final = min(request.final_length, kv.capacity * kv.block_size)  # alone it may try its luck
        needed = max(needed, kv.num_blocks_missing(request, final, hits))
        free -= num_blocks_promised(sched)
    never_fits = sched.config.ends_outgrown and kv.blocks_for(len(request.token_ids)) > kv.capacity
    if needed > free and not sched.running:
        free += reclaim_loaded(sched, request, needed - free)
    if needed > free or never_fits:
        return Blocked(WaitReason.KV_BLOCKS, request, needed, max(free, 0))
    return None


def num_blocks_promised(sched: "Scheduler") -> int:
    """Blocks that the running requests will still need if each runs to its full length."""
    blocks_for = sched.kv.blocks_for
    return sum(max(0, blocks_for(request.final_length) - len(request.blocks)) for request in sched.running)


def admit(
    sched: "Scheduler",
    plan: StepPlan,
    request: Request,
    hits: list[KVCacheBlock],
    num_hit_tokens: int,
    end: int,
    num_padding: int,
) -> None:
    """Move a request from the queue to running, its cached prefix counted as computed."""
    kv = sched.kv
    sched.leave_queue(request)
    if request.is_loaded:
        request.is_loaded = False
    else:
        kv.adopt(request, hits)
    blocks = kv.grow(request, end)
    assert blocks is not None, "admission was checked"
    request.num_computed_tokens = num_hit_tokens
    kv.hash_full_blocks(request, end)
    for passed in plan.passed_over:
        if passed.request is not None:
            passed.request.num_bypassed += 1
    plan.admissions.append(Admission(request, request.was_admitted, num_hit_tokens))
    plan.give(request, end - num_hit_tokens, [])
    if request.media:
        plan_media(sched, plan, request, num_hit_tokens, end - num_hit_tokens)
    if num_padding:
        plan.spec_token_ids[request.request_id] = [-1] * num_padding
        plan.num_draft_tokens += num_padding
    plan.count_chunk(num_hit_tokens, end - num_hit_tokens)
    sched.start_running(request, num_hit_tokens)


def pass_over(sched: "Scheduler", plan: StepPlan, blocked: Blocked) -> bool:
    """With admission skip: leave a request that lacks blocks where it is and go on; False if it stops admission."""
    if sched.knobs.admission is AdmissionRule.STRICT or blocked.reason is not WaitReason.KV_BLOCKS:
        return False
    plan.passed_over.append(blocked)
    return True


def may_pass(sched: "Scheduler", plan: StepPlan) -> bool:
    """Whether one more may pass those passed over in this step: nobody is passed more than `max_bypass` times."""
    passed = [blocked.request for blocked in plan.passed_over]
    return len(passed) < MAX_LOOKAHEAD and all(
        request is not None and request.num_bypassed < sched.knobs.max_bypass for request in passed
    )


def eviction_helps(sched: "Scheduler", blocked: Blocked) -> bool:
    """Whether a request that lacks blocks would get them if all it outranks were thrown out: nobody goes in vain."""
    request = blocked.request
    if blocked.reason is not WaitReason.KV_BLOCKS or request is None or not may_evict(sched):
        return False
    outranked = [running for running in sched.running if running.priority > request.priority]
    users = Counter(block for running in outranked for block in running.blocks)
    num_freed = sum(count == block.ref_cnt for block, count in users.items())
    return blocked.needed <= blocked.free + num_freed


def may_evict(sched: "Scheduler") -> bool:
    """Whether the operator lets waiting requests throw out running ones."""
    return sched.knobs.preempt_on_arrival and sched.knobs.policy is SchedulingPolicy.PRIORITY


def evict_for(sched: "Scheduler", plan: StepPlan, request: Request) -> bool:
    """With `preempt_on_arrival`: throw out the running request of largest priority value, if larger than this one's."""
    if not may_evict(sched) or not sched.running:
        return False
    victim = max(sched.running, key=lambda running: (running.priority, running.arrival_time))
    num_settled = victim.num_computed_tokens - (victim.planned_tokens if victim.planned_in == plan.step else 0)
    if victim.priority <= request.priority or sched.kv.is_built_upon(victim, num_settled):
        return False  # what it was to compute in this very step may be another's prefix already
    sched.preempt(victim, beneficiary=request, plan=plan)
    return True
