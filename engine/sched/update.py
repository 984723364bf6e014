"""Taking a step's result: append sampled tokens, roll back rejected drafts, end what is done.

Called only by `Scheduler.update_from_output`. A result that comes for a request that has ended, or whose in-flight
results were dropped, is ignored and counted as wasted.
"""

from typing import TYPE_CHECKING

from schedtop.engine.outputs import RequestOutput
from schedtop.engine.request import Request, State
from schedtop.engine.sched.output import ModelRunnerOutput
from schedtop.engine.sched.plan import StepPlan
from schedtop.engine.sched.stop import stop_by_token_or_length
from schedtop.engine.snapshot import FinishReason, WaitReason

if TYPE_CHECKING:
    from schedtop.engine.sched.scheduler import Scheduler


def take_result(sched: "Scheduler", plan: StepPlan, result: ModelRunnerOutput) -> list[RequestOutput]:
    """One `RequestOutput` per request that got tokens or ended, in schedule order."""
    now = sched.clock()
    previous_end = sched.stats.begin_result(now)
    spec, is_async, stale = plan.spec_token_ids, plan.is_async, plan.stale
    logprobs, conditions = result.logprobs, sched.stop_conditions
    outputs: list[RequestOutput] = []
    ended: list[RequestOutput] = []
    num_regular = 0
    running = State.RUNNING  # a local: reading an enum's member costs more than the rest of a turn
    for request, tokens in zip(plan.requests, result.sampled_token_ids, strict=True):
        is_running = request.state is running
        if (stale or not is_running) and not is_wanted(sched, plan, request, len(tokens)):
            continue
        if spec and request.request_id in spec:
            reject_drafts(sched, plan, request, len(spec[request.request_id]), len(tokens))
        if request.media:
            sched.encoder.release_consumed(request)
        if not tokens:
            if not is_async and request.num_computed_tokens == len(request.token_ids):
                request.num_computed_tokens -= 1  # the runner sampled nothing: its last token is run again
            continue
        num_new = len(tokens)
        if request.last_token_at == previous_end and num_new == 1:
            num_regular += 1
        else:
            sched.stats.count_irregular(request, num_new, now)
        request.last_token_at = now
        output = RequestOutput(request.request_id, tokens)
        outputs.append(output)
        if num_new > 1 or conditions:
            append_checked(sched, request, output)
        else:
            token_ids, token = request.token_ids, tokens[0]
            token_ids.append(token)
            if len(token_ids) >= request.max_total_tokens or token in request.stop_token_ids:
                output.finish_reason = stop_by_token_or_length(request)
        if logprobs:
            output.logprobs = logprobs.get(request.request_id)
        if is_async:
            request.num_output_placeholders -= len(output.new_token_ids)
            num_settled = request.num_computed_tokens - request.num_output_placeholders
            if is_running and num_settled >= request.hash_at:
                sched.kv.hash_full_blocks(request, num_settled)
        if not is_running:
            sched.num_waiting_tokens += len(output.new_token_ids)
        if output.finish_reason is not None:
            ended.append(output)
    for output in outputs if result.prompt_logprobs else ():
        output.prompt_logprobs = result.prompt_logprobs.get(output.request_id)
    sched.stats.count_result(outputs, num_regular, now - previous_end)
    end_requests(sched, ended, now)
    take_new_drafts(sched, plan, result)
    return outputs


def is_wanted(sched: "Scheduler", plan: StepPlan, request: Request, num_tokens: int) -> bool:
    """Whether a result that comes late still counts: not for a request that has ended, nor where it was dropped.

    One that was preempted meanwhile is ready to run again once its last result has come.
    """
    if request.is_finished or request.request_id in plan.stale:
        sched.stats.wasted_tokens += num_tokens
        return False
    if request.defer_reason is WaitReason.IN_FLIGHT and not sched.has_result_to_come(request):
        sched.undefer(request)
    return True


def reject_drafts(sched: "Scheduler", plan: StepPlan, request: Request, num_drafts: int, num_sampled: int) -> None:
    """Take back what was counted as computed for drafts that the model didn't confirm.

    `num_sampled` tokens came: the accepted drafts and one more; none at all means that nothing was sampled.
    """
    num_accepted = max(num_sampled - 1, 0)
    num_rejected = num_drafts - num_accepted
    sched.stats.count_drafts(num_drafts, num_accepted)
    if request.state is State.RUNNING:
        request.num_computed_tokens -= num_rejected
        if num_sampled == 0:
            request.num_computed_tokens -= 1  # the token the drafts followed must be run again to be sampled from
    if plan.is_async:
        request.num_output_placeholders -= num_rejected + (num_sampled == 0)


def append_checked(sched: "Scheduler", request: Request, output: RequestOutput) -> None:
    """Append tokens one by one, cutting the output where the request ends."""
    tokens = output.new_token_ids
    for index, token in enumerate(tokens):
        request.token_ids.append(token)
        output.finish_reason = stop_reason(sched, request)
        if output.finish_reason is not None:
            sched.stats.wasted_tokens += len(tokens) - index - 1
            output.new_token_ids = tokens[: index + 1]
            return


def stop_reason(sched: "Scheduler", request: Request) -> FinishReason | None:
    """The first stop condition that holds."""
    reason = stop_by_token_or_length(request)
    for condition in sched.stop_conditions:
        if reason is not None:
            break
        reason = condition(request)
    return reason


def end_requests(sched: "Scheduler", ended: list[RequestOutput], now: float) -> None:
    """Free what finished; the list of running requests is rebuilt once, however many ended."""
    if not ended:
        return
    for output in ended:
        request = sched.requests[output.request_id]
        assert output.finish_reason is not None
        if request.state is not State.RUNNING:
            sched.leave_queue(request)
        output.num_cached_tokens = request.num_cached_tokens
        sched.stats.count_end(request, now)
        sched.settle_end(request, output.finish_reason)
    sched.forget_ended()


def take_new_drafts(sched: "Scheduler", plan: StepPlan, result: ModelRunnerOutput) -> None:
    """Keep the proposer's drafts for requests that will decode next."""
    if plan.is_async:
        return  # the next step is planned already: its drafts stand as unknown, and the runner fills them in
    limit = sched.knobs.num_speculative_tokens
    for request_id, drafts in result.draft_token_ids.items():
        request = sched.requests.get(request_id)
        if limit and request is not None and request.state is State.RUNNING and request_id not in plan.stale:
            request.spec_token_ids = list(drafts[:limit])
