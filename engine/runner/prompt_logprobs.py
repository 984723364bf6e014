"""Log-probabilities of prompt tokens, gathered over the chunks of a prompt and reported once it is computed."""

from collections.abc import Callable, Iterable

import torch

from schedtop.engine.runner.batch import InputBatch, RunnerRequest, StepBatch
from schedtop.engine.runner.sampler import log_probabilities
from schedtop.engine.sched.output import ModelRunnerOutput

Entry = list[tuple[int, float]] | None


class PromptLogprobs:
    """One entry per prompt token: None for the first and for those found in the prefix cache, else as `logprobs`."""

    def __init__(self, batch: InputBatch, logits_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._batch = batch
        self._logits_of = logits_of
        self._entries: dict[str, list[Entry]] = {}

    def forget(self, req_ids: Iterable[str]) -> None:
        """Requests that ended or start anew."""
        for req_id in req_ids:
            self._entries.pop(req_id, None)

    def collect(self, step: StepBatch, hidden: torch.Tensor, output: ModelRunnerOutput) -> None:
        """Take what this step's hidden states [num_tokens, hidden_size] tell."""
        first = 0
        for request, count, end in zip(step.requests, step.meta.query_lens, step.meta.context_lens, strict=True):
            if request.sampling.prompt_logprobs is not None and end - count < request.num_prompt_tokens:
                self._take_chunk(request, hidden[first : first + count], end - count, output)
            first += count

    def _take_chunk(self, request: RunnerRequest, hidden: torch.Tensor, start: int, output: ModelRunnerOutput) -> None:
        entries = self._entries.setdefault(request.req_id, [None] * (start + 1))
        assert request.sampling.prompt_logprobs is not None
        end = min(start + len(hidden), request.num_prompt_tokens - 1)
        targets = self._batch.tokens_of(request)[start + 1 : end + 1].tolist()
        if targets:
            logits = self._logits_of(hidden[: len(targets)])
            entries += log_probabilities(logits, targets, [request.sampling.prompt_logprobs] * len(targets))
        if start + len(hidden) >= request.num_prompt_tokens:
            output.prompt_logprobs[request.req_id] = self._entries.pop(request.req_id)
