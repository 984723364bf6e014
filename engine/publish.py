"""Turns the scheduler's state into the frozen structs of `snapshot.py`. Reads only."""

import time

from schedtop.engine.outputs import RequestOutput
from schedtop.engine.sched.explain import request_row, running_rows, waiting_by_reason, waiting_rows
from schedtop.engine.sched.interface import SchedulerInterface
from schedtop.engine.sched.plan import StepPlan
from schedtop.engine.snapshot import KvMap, RequestDetail, Snapshot, StepRecord, Viewport

NUM_PREEMPTIONS_SHOWN = 50
MAX_CELLS = 4096
_MOST_SEVERE_FIRST = "phsuc"
"""Cell letters from least to most telling: a cell shows the most telling state among its blocks."""


def step_record(
    sched: SchedulerInterface, plan: StepPlan, outputs: list[RequestOutput], forward_s: float, update_s: float
) -> StepRecord:
    """What a finished step did."""
    now = sched.clock()
    samples = sched.stats.take_samples()
    total, num_drafts = plan.total_num_scheduled_tokens, plan.num_draft_tokens
    num_resumed = sum(admission.is_resumed for admission in plan.admissions)
    return StepRecord(
        step=plan.step,
        mono=now,
        wall=time.time(),
        duration_s=now - plan.started_at,
        schedule_s=plan.schedule_s,
        forward_s=forward_s,
        update_s=update_s,
        budget=plan.initial_budget,
        num_decode_tokens=plan.num_decode_tokens,
        num_prefill_tokens=total - plan.num_decode_tokens - num_drafts,
        num_draft_tokens=num_drafts,
        num_scheduled_reqs=len(plan.requests),
        largest_prefill_chunk=plan.largest_prefill_chunk,
        num_running=len(sched.running),
        num_waiting=sched.num_waiting,
        num_deferred=len(sched.deferred),
        blocks_free=sched.kv.pool.num_free,
        blocks_in_use=sched.kv.pool.num_usable - sched.kv.pool.num_free,
        num_admitted=len(plan.admissions) - num_resumed,
        num_resumed=num_resumed,
        num_preempted=len(plan.preemptions),
        num_finished=sum(output.finish_reason is not None for output in outputs),
        num_lost_tokens=samples.num_lost_tokens,
        num_output_tokens=samples.num_output_tokens,
        limited_by=plan.limited_by,
        ttft=samples.ttft,
        itl=samples.itl,
        e2e=samples.e2e,
        queue_time=samples.queue_time,
        num_context_tokens=plan.num_context_tokens,
    )


def build_snapshot(
    sched: SchedulerInterface, view: Viewport, generation: int, last_step: StepRecord | None
) -> Snapshot:
    """The engine at this boundary. Costs what the viewport shows, not what waits."""
    running, num_running_matched, is_running_cut = running_rows(sched, view)
    waiting, num_waiting_matched, is_waiting_cut = waiting_rows(sched, view)
    return Snapshot(
        step=sched.step,
        mono=sched.clock(),
        wall=time.time(),
        generation=generation,
        knobs=sched.knobs,
        pause=sched.pause_state,
        num_running=len(sched.running),
        num_waiting=sched.num_waiting,
        num_deferred=len(sched.deferred),
        waiting_by_reason=waiting_by_reason(sched),
        pool=sched.kv.usage(),
        running=running,
        waiting=waiting,
        num_running_matched=num_running_matched,
        num_waiting_matched=num_waiting_matched,
        last_step=last_step,
        counters=sched.stats.counters(sched.kv.pool.num_evictions),
        recent_preemptions=list(sched.stats.recent_preemptions)[-NUM_PREEMPTIONS_SHOWN:],
        last_step_mono=last_step.mono if last_step else None,
        kv_map=kv_map(sched, view.kv_cells, view.detail) if view.kv_cells > 0 else None,
        detail=request_detail(sched, view.detail) if view.detail is not None else None,
        is_scan_cut=is_running_cut or is_waiting_cut,
    )


def request_detail(sched: SchedulerInterface, request_id: str) -> RequestDetail | None:
    """One request from close by; None when it isn't live."""
    request = sched.requests.get(request_id)
    if request is None:
        return None
    return RequestDetail(
        request_id=request_id,
        row=request_row(sched, request),
        block_ids=[block.block_id for block in request.blocks],
        events=list(request.events),
        output_token_ids=request.output_token_ids,
    )


def kv_map(sched: SchedulerInterface, num_cells: int, marked: str | None) -> KvMap:
    """The pool as at most `num_cells` cells of equally many blocks, in order of block id."""
    states = sched.kv.block_states()
    per_cell = max(1, -(-len(states) // min(num_cells, MAX_CELLS)))
    letters = [letter for letter in _MOST_SEVERE_FIRST if letter in states]
    cells = [_cell(letters, states[start : start + per_cell]) for start in range(0, len(states), per_cell)]
    request = sched.requests.get(marked) if marked is not None else None
    first = sched.kv.pool.first_usable_id
    marks = sorted({(block.block_id - first) // per_cell for block in request.blocks}) if request else []
    return KvMap(blocks_per_cell=per_cell, cells="".join(cells), marks=marks)


def _cell(letters: list[str], states: str) -> str:
    """The letter of several blocks: searching a text is many times faster than looking at each."""
    for letter in letters:
        if letter in states:
            return letter
    return "."
