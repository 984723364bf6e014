"""KV that comes from, or goes to, elsewhere: what the scheduler does when a connector's transfer ends.

Starting a load is part of admission (`waiting.py`). Every call here is idempotent: requests may have ended meanwhile.
"""

from itertools import takewhile
from typing import TYPE_CHECKING

from schedtop.engine.request import Request
from schedtop.engine.sched.interface import SchedulerInterface
from schedtop.engine.sched.output import ModelRunnerOutput
from schedtop.engine.snapshot import WaitReason

if TYPE_CHECKING:
    from schedtop.engine.sched.scheduler import Scheduler


def take_transfers(sched: "Scheduler", result: ModelRunnerOutput) -> None:
    """Transfers that ended while a step ran."""
    for request_id, is_ok in result.finished_loads.items():
        load_finished(sched, request_id, is_ok)
    for request_id in result.finished_sends:
        send_finished(sched, request_id)


def connector_answered(sched: SchedulerInterface, request_id: str) -> None:
    """The connector knows by now what it can load for a request: look at it again."""
    request = sched.requests.get(request_id)
    if request is not None and request.defer_reason is WaitReason.KV_TRANSFER:
        sched.undefer(request)


def load_finished(sched: SchedulerInterface, request_id: str, is_ok: bool) -> None:
    """A connector's load has ended; unknown or ended requests are fine. A failed one is computed here instead."""
    request = sched.requests.get(request_id)
    is_loaded = sched.kv.end_load(request_id, request, is_ok)
    if is_loaded is None or request is None:
        return
    request.is_loaded = is_loaded
    request.skips_connector = not is_ok
    if not is_loaded:
        request.num_external_tokens = 0
    sched.undefer(request)


def send_finished(sched: SchedulerInterface, request_id: str) -> None:
    """A connector has read all it wanted of an ended request's blocks; idempotent."""
    sched.kv.end_send(request_id)


def reclaim_loaded(sched: "Scheduler", request: Request, num_blocks: int) -> int:
    """Nothing runs and `request` lacks blocks: take them from other requests that wait with loaded KV.

    Returns the number freed. Their content stays in the prefix cache as long as it lasts.
    """
    before = sched.kv.num_free
    loaded = list(takewhile(lambda waiting: waiting.is_loaded, sched.waiting))
    for other in reversed(loaded):
        if sched.kv.num_free - before >= num_blocks:
            break
        if other is not request:
            sched.lose_loaded(other)
    return sched.kv.num_free - before
