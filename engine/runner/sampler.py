"""From logits to tokens, for all rows of a step at once: adjust, cut down to candidates, draw.

Random numbers depend on the request's seed and the token's place in its output alone, never on the batch, on steps
or on preemptions. A full sort of the vocabulary costs more than the model; top-k candidates come first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from schedtop.engine.runner.penalties import adjust_logits
from schedtop.engine.sampling_params import SamplingParams

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy."""
FEW_CANDIDATES = 256
"""How many candidates are tried first where top-p or min-p alone limit them."""
DRAW_BLOCK = 256
"""Vocabulary entries summed together when a token is drawn from the whole of it."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of logits: whose it is, and what precedes the token to be sampled."""

    sampling: SamplingParams
    seed: int
    index: int
    """Place of the token in the request's output, from 0."""
    prompt_ids: NDArray[np.int32]
    output_ids: NDArray[np.int32]
    """Output before this token. Only read for penalties and bad words."""
    bitmask: NDArray[np.int32] | None = None
    """Allowed tokens by the request's grammar, 32 per word, lowest bit first; None = all."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.sampling.temperature < GREEDY_BELOW


class Sampler:
    """Draws one token per row. `eos_token_ids` are barred until a request's min_tokens is reached."""

    def __init__(self, eos_token_ids: Sequence[int] = ()) -> None:
        self._eos = tuple(eos_token_ids)

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        """Tokens int64 [num_rows] from fp32 `logits` [num_rows, vocab_size], which are changed in place."""
        adjust_logits(logits, rows, self._eos)
        random = [i for i, row in enumerate(rows) if not row.is_greedy]
        if len(random) == len(rows):
            return draw(logits, rows)
        tokens = logits.argmax(dim=-1)
        if random:
            tokens[random] = draw(logits[random], [rows[i] for i in random])
        return tokens


def draw(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Random tokens int64 [num_rows] by temperature, top-k, top-p and min-p, in this order."""
    settings = [row.sampling for row in rows]
    temperature = torch.tensor([s.temperature for s in settings], device=logits.device)
    logits = logits / temperature[:, None]
    uniform = torch.from_numpy(uniforms([row.seed for row in rows], [row.index for row in rows])).to(logits.device)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    for indices, num_candidates in _group(settings, logits.shape[1]):
        part, u = logits[indices], uniform[indices]
        if num_candidates == 0:
            tokens[indices] = draw_from_all(part, u)
        else:
            tokens[indices] = draw_limited(part, [settings[i] for i in indices], u, num_candidates)
    return tokens


def _group(settings: Sequence[SamplingParams], vocab_size: int) -> list[tuple[list[int], int]]:
    """Rows by how they are drawn: whole vocabulary (0), or this many candidates to start with."""
    groups: dict[str, list[int]] = {}
    for index, s in enumerate(settings):
        limited = 0 < s.top_k < vocab_size
        kind = "top_k" if limited else "nucleus" if s.top_p < 1.0 or s.min_p > 0.0 else "all"
        groups.setdefault(kind, []).append(index)
    few = {"all": 0, "nucleus": min(FEW_CANDIDATES, vocab_size)}
    few["top_k"] = max((settings[i].top_k for i in groups.get("top_k", ())), default=0)
    return [(indices, few[kind]) for kind, indices in groups.items()]


def draw_from_all(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse of the distribution function over the whole vocabulary, in two stages: a block, then a token in it."""
    num_rows, vocab_size = logits.shape
    weights = torch.exp(logits - logits.amax(dim=-1, keepdim=True))
    if rest := -vocab_size % DRAW_BLOCK:
        weights = torch.nn.functional.pad(weights, (0, rest))
    blocks = weights.view(num_rows, -1, DRAW_BLOCK)
    sums = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target = uniform[:, None] * sums[:, -1:]
    block = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp_(min=0)), 0.0)
    chosen = blocks[torch.arange(num_rows, device=logits.device), block[:, 0]]
    return block[:, 0] * DRAW_BLOCK + _invert(chosen, target - before)


def draw_limited(
    logits: torch.Tensor, settings: Sequence[SamplingParams], uniform: torch.Tensor, num_candidates: int
) -> torch.Tensor:
    """Draw among the `num_candidates` likeliest; where top-p or min-p reach further, among more of them."""
    values, ids = logits.topk(num_candidates, dim=-1)
    weights, is_cut_short = candidate_weights(logits, values, settings)
    drawn = _invert(weights, uniform[:, None] * weights.sum(dim=-1, dtype=torch.float64, keepdim=True))
    tokens = ids.gather(1, drawn[:, None])[:, 0]
    if is_cut_short.any():
        again = is_cut_short.nonzero()[:, 0].tolist()
        more = min(num_candidates * 16, logits.shape[1])
        tokens[again] = draw_limited(logits[again], [settings[i] for i in again], uniform[again], more)
    return tokens


def candidate_weights(
    logits: torch.Tensor, values: torch.Tensor, settings: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities of the sorted candidates `values`, those cut off as 0; and which rows needed more candidates."""
    num_candidates, vocab_size = values.shape[1], logits.shape[1]
    device = logits.device
    top_k = torch.tensor([s.top_k if 0 < s.top_k < vocab_size else vocab_size for s in settings], device=device)
    top_p = torch.tensor([s.top_p for s in settings], dtype=torch.float64, device=device)
    min_p = torch.tensor([s.min_p for s in settings], dtype=torch.float64, device=device)
    is_kept = torch.arange(num_candidates, device=device)[None] < top_k[:, None]
    has_all = top_k <= num_candidates
    within = values.masked_fill(~is_kept, -torch.inf)
    total = torch.where(has_all, within.logsumexp(dim=-1), logits.logsumexp(dim=-1))
    weights = torch.exp((within - total[:, None]).double())
    above = weights.cumsum(dim=-1) - weights
    is_kept &= (above < top_p[:, None]) | (top_p[:, None] >= 1.0)
    is_kept &= weights >= min_p[:, None] * weights[:, :1]
    is_cut_short = is_kept[:, -1] & ~has_all & (num_candidates < vocab_size)
    return weights.masked_fill(~is_kept, 0.0), is_cut_short


def _invert(weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index int64 [num_rows] of the entry in which the running sum of `weights` passes `target` [num_rows, 1].

    Never one of weight 0, even where rounding puts the target at the very end.
    """
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    last = (sums < sums[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(torch.searchsorted(sums, target, right=True), last)[:, 0]


def uniforms(seeds: Sequence[int], indices: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) per (seed, index): entry `index` of the stream that SplitMix64 gives for the seed."""
    mask = (1 << 64) - 1
    state = np.array([_mix_one(seed & mask) for seed in seeds], np.uint64)
    z = state + np.array([index + 1 for index in indices], np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    numbers: NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64) / float(1 << 53)
    return numbers


def _mix_one(value: int) -> int:
    """Scatter seeds, which people choose close together, over all 64 bits: else their streams would overlap."""
    mask = (1 << 64) - 1
    value = ((value ^ (value >> 33)) * 0xFF51AFD7ED558CCD) & mask
    value = ((value ^ (value >> 33)) * 0xC4CEB9FE1A85EC53) & mask
    return value ^ (value >> 33)


def log_probabilities(
    logits: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[list[tuple[int, float]]]:
    """Per row: (token, log-probability) of the given token first, then of the `counts[i]` likeliest others."""
    if not counts:
        return []
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(max(1, *counts), dim=-1)
    result = []
    for token, logprob, count, top_values, top_ids in zip(
        tokens, own, counts, values.tolist(), ids.tolist(), strict=True
    ):
        others = [pair for pair in zip(top_ids[:count], top_values[:count], strict=True) if pair[0] != token]
        result.append([(token, logprob), *others])
    return result
