"""`vllm serve MODEL --scheduler-cls schedtop.control.vllm.plugin.SchedtopScheduler`: our controls inside a real vLLM.

Only vLLM's methods and where our hooks go; what those do is in `hooks.py`. Derives from AsyncScheduler, which also
works in sync mode; a plain Scheduler subclass would silently lose async scheduling. Nothing else is imported up here:
whatever is missing or fails, vLLM serves on without control.
"""

import logging
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

logger = logging.getLogger("vllm.schedtop")
"""Below vLLM's own, so that our lines are in its log."""


def _attach(scheduler: Any) -> Any:
    """The hooks with an open control socket; None, and the log says why, without."""
    try:
        from schedtop.control.vllm.hooks import open_control

        return open_control(scheduler)
    except Exception as error:
        logger.exception("schedtop: no control socket (%s); vLLM serves on without it", error)
        return None


class SchedtopScheduler(AsyncScheduler):
    """vLLM's scheduler with a control socket."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.schedtop: Any = None
        """Our hooks; None: vLLM's scheduler as it is."""
        self.schedtop = _attach(self)

    def has_requests(self) -> bool:
        """Also the boundary of an idle or paused engine, where `schedule` is never called."""
        answer = None if self.schedtop is None else self.schedtop.has_requests(super().has_requests)
        return bool(super().has_requests()) if answer is None else bool(answer)

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """A request from vLLM's own front end."""
        result = super().add_request(request, *args, **kwargs)
        if self.schedtop is not None:
            self.schedtop.queued(request)
        return result

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Boundary, then vLLM's own planning, then the count of what it planned."""
        hooks = self.schedtop
        if hooks is None:
            return super().schedule(*args, **kwargs)
        hooks.before_step()
        output = super().schedule(*args, **kwargs)
        hooks.planned(output)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's own, then the count of what came, and the word to clients whose requests were aborted here."""
        hooks = self.schedtop
        if hooks is None:
            return super().update_from_output(scheduler_output, model_runner_output, *args, **kwargs)
        hooks.before_result()
        outputs = super().update_from_output(scheduler_output, model_runner_output, *args, **kwargs)
        hooks.after_result(outputs)
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: Any, *args: Any, **kwargs: Any) -> Any:
        """Ends from outside: a client that left, or our own abort."""
        ended = super().finish_requests(request_ids, finished_status, *args, **kwargs)
        if self.schedtop is not None:
            self.schedtop.ended_from_outside(ended)
        return ended

    def _handle_blocked_waiting_request(self, request: Any, *args: Any, **kwargs: Any) -> bool:
        """vLLM asks this of every waiting request it looks at: those kept back by an operator wait as well."""
        if self.schedtop is not None and self.schedtop.keeps_back(request):
            return False
        return bool(super()._handle_blocked_waiting_request(request, *args, **kwargs))

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Note the victim, for whom, and what is lost."""
        before = None if self.schedtop is None else self.schedtop.before_preemption(request)
        result = super()._preempt_request(request, *args, **kwargs)
        if before is not None:
            self.schedtop.preempted(request, *before)
        return result

    def shutdown(self) -> None:
        """Close the control socket, then vLLM's own."""
        if self.schedtop is not None:
            self.schedtop.shutdown()
        super().shutdown()
