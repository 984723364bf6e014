"""The self-check: proves the books of a live scheduler. Reads only; slow, so it runs when asked for."""

from schedtop.engine.request import State
from schedtop.engine.sched.interface import SchedulerInterface


def find_faults(sched: SchedulerInterface) -> list[str]:
    """Check the books, one sentence per fault; empty when all is well."""
    live = list(sched.requests.values())
    faults = sched.kv.faults(live)
    listed = {request.request_id for request in [*sched.running, *sched.waiting, *sched.deferred]}
    if listed != set(sched.requests) or len(sched.running) + sched.num_waiting != len(sched.requests):
        faults.append(f"requests {sorted(listed ^ set(sched.requests))} are in no list or in several")
    waiting_tokens = sum(r.num_tokens for r in live if r.state is not State.RUNNING)
    if waiting_tokens != sched.num_waiting_tokens:
        faults.append(f"{waiting_tokens} tokens wait, the count says {sched.num_waiting_tokens}")
    for request in live:
        if request.num_output_placeholders < 0:
            faults.append(f"{request} has {request.num_output_placeholders} placeholders")
        if request.state is not State.RUNNING and request.blocks and not request.is_loaded:
            faults.append(f"{request} holds {len(request.blocks)} blocks while it waits")
    usage = sched.kv.usage()
    if usage.free + usage.in_use + usage.held + usage.pending != usage.usable:
        faults.append(f"free + in use + held + pending is not usable: {usage}")
    return faults
