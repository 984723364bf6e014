"""A runner that computes nothing and takes a modelled time: on a virtual clock or in real time."""

import time
from collections.abc import Callable, Sequence

from schedtop.engine.request import Request
from schedtop.engine.sched.output import ModelRunnerOutput, SchedulerOutput
from schedtop.engine.sim.step_model import StepModel, StepShape

TOKEN = 7
"""What every request samples: nobody reads it."""


class SimulatedRunner:
    """Implements `ModelRunner`. `wait(seconds)` passes the time: a virtual clock's `advance`, or `time.sleep`."""

    def __init__(self, model: StepModel, wait: Callable[[float], None] = time.sleep) -> None:
        self.model = model
        self.wait = wait
        self._num_left: dict[str, int] = {}
        """Known tokens not computed yet, by request."""

    def resume(self, running: Sequence[Request]) -> None:
        """Take over requests that are running already: a forecast starts in the middle."""
        self._num_left.update({r.request_id: r.num_tokens - r.num_computed_tokens for r in running})

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Let the modelled time pass and sample one token where a request's known tokens are all computed."""
        left = self._num_left
        for req_id in [*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids]:
            left.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            left[new.req_id] = len(new.token_ids) - new.num_computed_tokens
        sampled: list[list[int]] = []
        num_decodes = 0
        for req_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            num_drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(req_id, ()))
            num_left = left[req_id]
            num_decodes += num_left == 1
            if num_tokens - num_drafts < num_left:
                left[req_id] = num_left - num_tokens
                sampled.append([])
            else:
                left[req_id] = 1
                sampled.append([TOKEN])
        total = scheduler_output.total_num_scheduled_tokens
        shape = StepShape(
            num_sequences=len(sampled),
            num_prefill_tokens=total - num_decodes,
            num_context_tokens=scheduler_output.num_context_tokens,
        )
        self.wait(self.model.seconds(shape))
        return ModelRunnerOutput(sampled_token_ids=sampled)

    def shutdown(self) -> None:
        """Nothing is held."""
