"""What is done to logits before a token is chosen: grammar, bias, barred tokens, penalties. Only rows that ask pay."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from schedtop.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from schedtop.engine.runner.sampler import SampleRow


def adjust_logits(logits: torch.Tensor, rows: "Sequence[SampleRow]", eos_token_ids: Sequence[int]) -> None:
    """Apply every row's settings to fp32 `logits` [num_rows, vocab_size], in place."""
    for index, row in enumerate(rows):
        sampling = row.sampling
        if row.bitmask is not None:
            _apply_bitmask(logits[index], row)
        if sampling.logit_bias:
            _add_bias(logits[index], sampling)
        if barred := _barred(row, eos_token_ids):
            logits[index, barred] = -torch.inf
        if has_penalties(sampling):
            _penalise(logits[index], row)


def has_penalties(sampling: SamplingParams) -> bool:
    """Whether tokens seen before change the odds."""
    return bool(sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty)


def needs_history(sampling: SamplingParams) -> bool:
    """Whether a row's logits depend on the very tokens before it, so that drafts must be taken one by one."""
    return has_penalties(sampling) or bool(sampling.bad_words_ids)


def _apply_bitmask(logits: torch.Tensor, row: "SampleRow") -> None:
    assert row.bitmask is not None
    allowed = np.unpackbits(row.bitmask.view(np.uint8), bitorder="little")[: len(logits)].astype(bool)
    allowed = np.pad(allowed, (0, len(logits) - len(allowed)))
    logits.masked_fill_(torch.from_numpy(~allowed).to(logits.device), -torch.inf)


def _add_bias(logits: torch.Tensor, sampling: SamplingParams) -> None:
    ids = torch.tensor(list(sampling.logit_bias), device=logits.device)
    logits[ids] += torch.tensor(list(sampling.logit_bias.values()), device=logits.device)


def _barred(row: "SampleRow", eos_token_ids: Sequence[int]) -> list[int]:
    """Tokens that may not come next: those that would end the output too early, and ends of bad words."""
    sampling = row.sampling
    barred: list[int] = []
    if row.index < sampling.min_tokens:
        barred += sampling.stop_token_ids
        barred += () if sampling.ignore_eos else eos_token_ids
    return barred + list(_ends_of_bad_words(sampling.bad_words_ids, row))


def _ends_of_bad_words(words: Iterable[tuple[int, ...]], row: "SampleRow") -> Iterable[int]:
    """Last tokens of words whose other tokens are the latest of the output."""
    for word in words:
        start = list(word[:-1])
        if len(start) <= len(row.output_ids) and row.output_ids[len(row.output_ids) - len(start) :].tolist() == start:
            yield word[-1]


def _penalise(logits: torch.Tensor, row: "SampleRow") -> None:
    """Repetition counts prompt and output; presence and frequency the output only."""
    sampling = row.sampling
    seen = torch.from_numpy(np.unique(np.concatenate([row.prompt_ids, row.output_ids])).astype(np.int64))
    if sampling.repetition_penalty != 1.0 and len(seen):
        seen = seen.to(logits.device)
        values, penalty = logits[seen], sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if len(row.output_ids) and (sampling.presence_penalty or sampling.frequency_penalty):
        ids, counts = np.unique(row.output_ids, return_counts=True)
        costs = sampling.presence_penalty + sampling.frequency_penalty * counts
        logits[torch.from_numpy(ids.astype(np.int64)).to(logits.device)] -= torch.from_numpy(
            costs.astype(np.float32)
        ).to(logits.device)
