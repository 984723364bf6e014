"""Turns a finished plan into the message that the runner executes."""

from typing import TYPE_CHECKING

from schedtop.engine.request import Request
from schedtop.engine.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from schedtop.engine.sched.plan import StepPlan

if TYPE_CHECKING:
    from schedtop.engine.sched.scheduler import Scheduler


def compose_output(sched: "Scheduler", plan: StepPlan) -> SchedulerOutput:
    """The plan in the runner's terms; what was noted since the last plan is reported once."""
    new, resumed = [], []
    for admission in plan.admissions:
        request = admission.request
        if admission.is_resumed:
            resumed.append(request.request_id)
        new.append(new_request_data(request, plan))
    preempted = sched.preempted_ids + [request.request_id for request in plan.preempted]
    finished, sched.finished_ids, sched.preempted_ids = sched.finished_ids, [], []
    return SchedulerOutput(
        step=plan.step,
        scheduled_new_reqs=new,
        scheduled_cached_reqs=CachedRequestData(plan.new_block_ids),
        num_scheduled_tokens=plan.num_scheduled_tokens,
        total_num_scheduled_tokens=plan.total_num_scheduled_tokens,
        scheduled_spec_decode_tokens=plan.spec_token_ids,
        preempted_req_ids=preempted,
        num_context_tokens=plan.num_context_tokens,
        encoder_inputs=plan.encoder_inputs,
        freed_media=sched.encoder.take_evicted(),
        kv_connector_metadata=sched.connector.build_connector_meta(plan.requests),
        finished_req_ids=finished,
        resumed_req_ids=resumed,
    )


def new_request_data(request: Request, plan: StepPlan) -> NewRequestData:
    """Everything the runner needs to know of a request it sees for the first time, or again."""
    return NewRequestData(
        req_id=request.request_id,
        token_ids=request.token_ids.copy(),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling_params=request.sampling,
        block_ids=[block.block_id for block in request.blocks],
        num_computed_tokens=request.num_computed_tokens - plan.num_scheduled_tokens[request.request_id],
        adapter=request.adapter,
        media=request.media,
        grammar=request.grammar,
    )
