"""What surrounds the two passes in planning a step: the empty plan, placeholders for what will be sampled, media, what
is taken back from a victim, and what limited the step. The passes are `running.py` and `waiting.py`.
"""

from typing import TYPE_CHECKING

from schedtop.engine.request import Request
from schedtop.engine.sched.output import UNKNOWN_DRAFT
from schedtop.engine.sched.plan import Blocked, StepPlan, num_attended
from schedtop.engine.snapshot import LimitedBy, PauseState, WaitReason

if TYPE_CHECKING:
    from schedtop.engine.sched.scheduler import Scheduler

_LIMITS = {
    WaitReason.BUDGET: LimitedBy.BUDGET,
    WaitReason.WHOLE_PROMPT: LimitedBy.BUDGET,
    WaitReason.SEQUENCE_CAP: LimitedBy.SEQUENCES,
    WaitReason.KV_BLOCKS: LimitedBy.BLOCKS,
    WaitReason.PREEMPTION: LimitedBy.BLOCKS,
    WaitReason.ENCODER: LimitedBy.ENCODER,
    WaitReason.PAUSED: LimitedBy.PAUSED,
}


def new_plan(sched: "Scheduler") -> StepPlan:
    """An empty plan for the step that the scheduler has just begun."""
    budget = 0 if sched.pause_state is PauseState.PAUSED_ALL else sched.knobs.max_num_batched_tokens
    return StepPlan(
        step=sched.step,
        budget=budget,
        initial_budget=budget,
        threshold=threshold(sched),
        is_async=sched.knobs.async_scheduling,
        started_at=sched.clock(),
    )


def threshold(sched: "Scheduler") -> int:
    """Most tokens for one request: off for a lone request; adaptive floors it at an equal share of the buffer.

    Adaptive alone does nothing: with no threshold there is nothing to floor.
    """
    knobs = sched.knobs
    most = knobs.long_prefill_token_threshold
    num_eligible = len(sched.running) + sched.num_waiting
    if num_eligible <= 1 or not most:
        return 0
    if knobs.long_prefill_token_threshold_adaptive:
        most = max(most, sched.config.max_num_batched_tokens // num_eligible)
    return most


def add_placeholders(sched: "Scheduler", plan: StepPlan) -> None:
    """Count the tokens this step will sample as there already, so that the next step can be planned over them.

    With drafts on, the next step's drafts aren't known either: the runner fills in what it proposes.
    """
    num_next_drafts = sched.knobs.num_speculative_tokens
    if not num_next_drafts and not plan.spec_token_ids:
        for request in plan.requests:
            if request.num_computed_tokens == len(request.token_ids) + request.num_output_placeholders:
                request.num_output_placeholders += 1
        return
    for request in plan.requests:
        num_drafts = len(plan.spec_token_ids.get(request.request_id, ()))
        known = len(request.token_ids) + request.num_output_placeholders + num_drafts
        if request.num_computed_tokens == known:
            request.num_output_placeholders += 1 + num_drafts
            request.spec_token_ids = [UNKNOWN_DRAFT] * num_next_drafts


def note_stop(plan: StepPlan, reason: WaitReason) -> None:
    """Say what kept pass 2 from admitting anybody, unless pass 1 knows better."""
    if plan.blocked is None or plan.blocked.request is None:
        plan.blocked = Blocked(reason)


def limiting_cause(sched: "Scheduler", plan: StepPlan) -> LimitedBy:
    """What kept this step from doing more; computed from what stopped the passes, never guessed."""
    if sched.pause_state is PauseState.PAUSED_ALL:
        return LimitedBy.PAUSED
    if plan.blocked is not None:
        return _LIMITS[plan.blocked.reason]
    if plan.budget <= 0 and any(
        request.num_computed_tokens < len(request.token_ids) for request in reversed(sched.running)
    ):
        return LimitedBy.BUDGET
    if sched.num_waiting and not sched.admits_new:
        return LimitedBy.PAUSED
    return LimitedBy.COMPUTE if plan.requests else LimitedBy.NOTHING_WAITING


def plan_media(sched: "Scheduler", plan: StepPlan, request: Request, start: int, num_tokens: int) -> None:
    """A share that reaches media was planned: reserve them, and have the new ones encoded in this step."""
    fresh = sched.encoder.commit(request, start, num_tokens)
    if fresh:
        plan.encoder_inputs[request.request_id] = fresh


def withdraw(sched: "Scheduler", victim: Request, plan: StepPlan) -> None:
    """Take back what this very step had given a request that is preempted: tokens, drafts, encoder work."""
    num_tokens = plan.take_back(victim)
    if not num_tokens:
        return
    for reader, item in sched.encoder.withdraw(victim, plan.encoder_inputs.pop(victim.request_id, [])):
        plan.encoder_inputs.setdefault(reader, []).append(item)
    plan.num_context_tokens -= num_attended(victim.num_computed_tokens, num_tokens)
    if victim.num_tokens + victim.num_output_placeholders == victim.num_computed_tokens + 1:
        plan.num_decode_tokens -= 1
    if sched.config.unhashes_withdrawn:
        sched.kv.unhash_from(victim, victim.num_computed_tokens)
