"""The seam between the scheduler and whatever computes tokens: real, fake or simulated."""

from typing import Protocol

from schedtop.engine.sched.output import ModelRunnerOutput, SchedulerOutput


class ModelRunner(Protocol):
    """Executes planned steps, in order. Owned by the core thread; `execute_model` may run in an executor thread."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and sample.

        Applies `finished_req_ids`, `preempted_req_ids`, new and cached request data first, then computes
        `num_scheduled_tokens` per request and samples where a request's known tokens are all computed.
        """
        ...

    def shutdown(self) -> None:
        """Release what the runner holds; idempotent."""
        ...
