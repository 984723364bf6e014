"""A runner that computes nothing and takes a modelled time: on a virtual clock or in real time."""

import time
from collections.abc import Callable, Mapping, Sequence

from schedtop.engine.request import Request
from schedtop.engine.sched.output import ModelRunnerOutput, SchedulerOutput
from schedtop.engine.sim.step_model import StepModel, StepShape

TOKEN = 7
"""What every request samples: nobody reads it."""
END_TOKEN = 8
"""What a request samples last, if it is known where it ends."""


class SimulatedRunner:
    """Implements `ModelRunner`. `wait(seconds)` passes the time: a virtual clock's `advance`, or `time.sleep`.

    `lengths`: request id -> tokens, prompt included, at which it samples `END_TOKEN`; may grow while it runs.
    """

    def __init__(
        self,
        model: StepModel,
        wait: Callable[[float], None] = time.sleep,
        lengths: Mapping[str, int] | None = None,
    ) -> None:
        self.model = model
        self.wait = wait
        self._lengths = {} if lengths is None else lengths
        self._num_known: dict[str, int] = {}
        """Tokens of the requests whose length is given."""
        self._num_left: dict[str, int] = {}
        """Known tokens not computed yet, by request."""

    def resume(self, running: Sequence[Request]) -> None:
        """Take over requests that are running already: a forecast starts in the middle."""
        self._num_left.update({r.request_id: r.num_tokens - r.num_computed_tokens for r in running})
        self._num_known.update({r.request_id: r.num_tokens for r in running if r.request_id in self._lengths})

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Let the modelled time pass and sample one token where a request's known tokens are all computed."""
        left = self._num_left
        for req_id in [*scheduler_output.finished_req_ids, *scheduler_output.preempted_req_ids]:
            left.pop(req_id, None)
            self._num_known.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            left[new.req_id] = len(new.token_ids) - new.num_computed_tokens
            if new.req_id in self._lengths:
                self._num_known[new.req_id] = len(new.token_ids)
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
                sampled.append([self._sample(req_id)])
        total = scheduler_output.total_num_scheduled_tokens
        shape = StepShape(
            num_sequences=len(sampled),
            num_prefill_tokens=total - num_decodes,
            num_context_tokens=scheduler_output.num_context_tokens,
        )
        self.wait(self.model.seconds(shape))
        return ModelRunnerOutput(sampled_token_ids=sampled)

    def _sample(self, req_id: str) -> int:
        if req_id not in self._num_known:
            return TOKEN
        self._num_known[req_id] += 1
        return END_TOKEN if self._num_known[req_id] >= self._lengths[req_id] else TOKEN

    def shutdown(self) -> None:
        """Nothing is held."""
