"""Turns a step's logits into accepted drafts and sampled tokens, request by request.

A draft is accepted when the token sampled in its place equals it. As drafts are single tokens, not distributions,
this is exact for greedy and leaves the distribution as it is for sampling; and the random numbers used are those that
would have been used without drafts.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from schedtop.engine.runner.batch import InputBatch, RunnerRequest, StepBatch
from schedtop.engine.runner.penalties import needs_history
from schedtop.engine.runner.sampler import Sampler, SampleRow, log_probabilities
from schedtop.engine.sched.output import ModelRunnerOutput


def sample_step(
    sampler: Sampler, batch: InputBatch, step: StepBatch, logits: torch.Tensor, output: ModelRunnerOutput
) -> None:
    """Fill `output` with tokens and log-probabilities, and append the tokens to the batch.

    `logits` holds the step's `sampled_rows`; they are changed in place.
    """
    raw = logits.clone() if any(step.requests[i].sampling.logprobs is not None for i, _ in step.sampled_of) else None
    first = 0
    together: list[tuple[int, int, int]] = []
    for index, count in step.sampled_of:
        request = step.requests[index]
        if count > 1 and (request.grammar is not None or needs_history(request.sampling)):
            rows = logits[first : first + count]
            output.sampled_token_ids[index] = _sample_one_by_one(sampler, batch, request, rows)
        else:
            together.append((index, first, count))
        first += count
    _sample_together(sampler, batch, step, logits, together, output)
    for index, _ in step.sampled_of:
        _append(batch, step.requests[index], output.sampled_token_ids[index])
    if raw is not None:
        _report_logprobs(step, raw, output)


def _sample_together(
    sampler: Sampler,
    batch: InputBatch,
    step: StepBatch,
    logits: torch.Tensor,
    spans: Sequence[tuple[int, int, int]],
    output: ModelRunnerOutput,
) -> None:
    """All rows whose logits don't depend on the drafts before them, in one go."""
    rows = [
        make_row(batch, step.requests[index], offset, len(logits[0]))
        for index, _, count in spans
        for offset in range(count)
    ]
    if not rows:
        return
    flat = [first + offset for _, first, count in spans for offset in range(count)]
    part = logits if len(flat) == len(logits) else logits[flat]
    tokens = sampler.sample(part, rows).tolist()
    start = 0
    for index, _, count in spans:
        output.sampled_token_ids[index] = accepted(tokens[start : start + count], step.requests[index].drafts)
        start += count


def accepted(tokens: list[int], drafts: Sequence[int]) -> list[int]:
    """The tokens up to and including the first that differs from its draft."""
    for offset, (token, draft) in enumerate(zip(tokens, drafts, strict=False)):
        if token != draft:
            return tokens[: offset + 1]
    return tokens


def _sample_one_by_one(sampler: Sampler, batch: InputBatch, request: RunnerRequest, logits: torch.Tensor) -> list[int]:
    """Rows that need the token before them: each is sampled once the draft before it has been accepted."""
    tokens: list[int] = []
    for offset, draft in enumerate([*request.drafts, None]):
        row = make_row(batch, request, offset, logits.shape[1])
        token = int(sampler.sample(logits[offset : offset + 1], [row])[0])
        tokens.append(token)
        if request.grammar is not None:
            request.grammar.accept(token)
        if token != draft:
            break
    return tokens


def make_row(batch: InputBatch, request: RunnerRequest, offset: int, vocab_size: int) -> SampleRow:
    """What the sampler must know to sample behind `offset` drafts."""
    known = batch.tokens_of(request)
    output_ids = known[request.num_prompt_tokens :]
    if offset and needs_history(request.sampling):
        output_ids = np.concatenate([output_ids, np.array(request.drafts[:offset], np.int32)])
    return SampleRow(
        sampling=request.sampling,
        seed=request.seed,
        index=len(known) - request.num_prompt_tokens + offset,
        prompt_ids=known[: request.num_prompt_tokens],
        output_ids=output_ids,
        bitmask=_bitmask(request, vocab_size),
    )


def _bitmask(request: RunnerRequest, vocab_size: int) -> NDArray[np.int32] | None:
    if request.grammar is None:
        return None
    words = np.zeros(-(-vocab_size // 32), np.int32)
    request.grammar.fill_bitmask(words)  # type: ignore[arg-type]
    return words


def _append(batch: InputBatch, request: RunnerRequest, tokens: Sequence[int]) -> None:
    was_followed = len(request.drafts) > 0
    for token in tokens:
        batch.append_token(request, token)
        if request.grammar is not None and not was_followed:
            request.grammar.accept(token)


def _report_logprobs(step: StepBatch, raw: torch.Tensor, output: ModelRunnerOutput) -> None:
    """Log-probabilities as the model gave them, before any sampling setting."""
    first = 0
    flat: list[int] = []
    tokens: list[int] = []
    counts: list[int] = []
    owners: list[str] = []
    for index, count in step.sampled_of:
        request, sampled = step.requests[index], output.sampled_token_ids[index]
        if (wanted := request.sampling.logprobs) is not None:
            flat += range(first, first + len(sampled))
            tokens += sampled
            counts += [wanted] * len(sampled)
            owners += [request.req_id] * len(sampled)
        first += count
    for owner, entry in zip(owners, log_probabilities(raw[flat], tokens, counts), strict=True):
        output.logprobs.setdefault(owner, []).append(entry)
