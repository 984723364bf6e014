"""How long a step takes: `step = d + s·sequences + p·prefill tokens + a·context tokens`. Times in seconds.

`StepModel` is the formula; `StepModelFit` learns its coefficients from live steps.
"""

import math
from collections.abc import Sequence

import msgspec

from schedtop.engine.snapshot import StepRecord


class StepShape(msgspec.Struct, frozen=True, gc=False):
    """What a step's time depends on."""

    num_sequences: int
    """Requests scheduled."""
    num_prefill_tokens: int
    """Tokens beyond one per decoding request."""
    num_context_tokens: int
    """Context tokens attended to, summed over the scheduled tokens."""

    @classmethod
    def of(cls, record: StepRecord) -> "StepShape":
        """That of a step which was taken."""
        return cls(record.num_scheduled_reqs, record.num_prefill_tokens, record.num_context_tokens)


class StepModel(msgspec.Struct, frozen=True, kw_only=True):
    """Coefficients in seconds."""

    base_s: float
    per_sequence_s: float
    per_prefill_token_s: float
    per_context_token_s: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        """Modelled duration of a step."""
        return (
            self.base_s
            + self.per_sequence_s * shape.num_sequences
            + self.per_prefill_token_s * shape.num_prefill_tokens
            + self.per_context_token_s * shape.num_context_tokens
        )

    def budget_for(self, step_s: float, num_sequences: int, num_context_tokens: int = 0) -> int:
        """Most prefill tokens in a step of at most `step_s` beside `num_sequences` decodes; 0 if even they take longer.

        Raises `ValueError` while the model has no cost per prefill token.
        """
        if self.per_prefill_token_s <= 0:
            raise ValueError("the step model has no cost per prefill token yet: no prefill was seen")
        fixed = self.seconds(StepShape(num_sequences, 0, num_context_tokens))
        return max(0, int((step_s - fixed) / self.per_prefill_token_s))


PAPER_MODEL = StepModel(base_s=0.008, per_sequence_s=0.00006, per_prefill_token_s=0.00002)
"""8 ms + 0.06 ms per sequence + 20 ms per 1,000 prefill tokens."""


_FORGET = 0.998
"""What a sample still weighs one step later: a memory of some 500 steps."""
_MIN_SAMPLES = 20
_RIDGE = 1e-3
"""Pull towards the last solution, in samples: keeps a coefficient that the present load says nothing about."""
_HUBER = 2.5
"""Residuals beyond so many typical ones count as outliers and weigh less."""
_LONGEST_BETWEEN = 2.0
"""A time from result to result beyond so many step durations isn't the engine's: it was paused or held up."""
_LEARN = 0.02
"""How fast the typical residual follows."""
_SCALES = (1.0, 10.0, 100.0, 100_000.0)
"""Typical sizes of the four features, so that the equations are well conditioned."""


class FittedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What the fit knows now. Spread and typical error in seconds; ranges are the smallest and largest seen."""

    model: StepModel
    num_samples: int
    r_squared: float
    residual_s: float
    """Typical absolute residual."""
    sequences_seen: tuple[int, int]
    prefill_tokens_seen: tuple[int, int]
    context_tokens_seen: tuple[int, int]

    def beyond_seen(self, shape: StepShape) -> list[str]:
        """What of a step lies outside everything seen, in words: the model extrapolates there."""
        pairs = (
            ("sequences", shape.num_sequences, self.sequences_seen),
            ("prefill tokens", shape.num_prefill_tokens, self.prefill_tokens_seen),
            ("context tokens", shape.num_context_tokens, self.context_tokens_seen),
        )
        return [
            f"{value} {name}, seen were {low} to {high}"
            for name, value, (low, high) in pairs
            if not low <= value <= high
        ]


class StepModelFit:
    """Recursive least squares with forgetting, robust to outliers, of the relative error.

    Relative, since what slows a machine down slows long steps by more: else a few long prefills would decide alone.
    The normal equations are what is carried from step to step; they are solved when somebody asks.
    """

    def __init__(self) -> None:
        self.num_samples = 0
        self._matrix = [[0.0] * 4 for _ in range(4)]
        self._vector = [0.0] * 4
        self._solution = [0.0] * 4
        self._residual = self._relative = 0.0
        self._weight = self._sum_y = self._sum_yy = self._sum_rr = 0.0
        self._last_mono = -math.inf
        self._had_more_to_do = False
        self._ranges = [[1 << 60, 0], [1 << 60, 0], [1 << 60, 0]]

    def add(self, record: StepRecord) -> None:
        """Learn from a finished step.

        While steps follow each other, the time from result to result is what requests wait for: what lies between two
        steps is part of it, and steps planned ahead overlap. After an idle time it is the step's own duration.
        """
        seconds, since_last = record.duration_s, record.mono - self._last_mono
        if since_last < seconds or (self._had_more_to_do and since_last < _LONGEST_BETWEEN * seconds):
            seconds = since_last
        self._last_mono = record.mono
        self._had_more_to_do = record.num_running > 0
        if record.num_scheduled_reqs == 0 or seconds <= 0:
            return
        shape = StepShape.of(record)
        self._learn(_features(shape), seconds)
        for span, value in zip(self._ranges, msgspec.structs.astuple(shape), strict=True):
            span[0], span[1] = min(span[0], value), max(span[1], value)

    def fitted(self) -> FittedModel | None:
        """The model as of now; None before there are enough samples."""
        if self.num_samples < _MIN_SAMPLES:
            return None
        self._solve()
        base, *rest = (value / scale for value, scale in zip(self._solution, _SCALES, strict=True))
        variance = self._sum_yy - self._sum_y**2 / self._weight
        sequences, prefill, context = ((span[0], span[1]) for span in self._ranges)
        return FittedModel(
            model=StepModel(
                base_s=base, per_sequence_s=rest[0], per_prefill_token_s=rest[1], per_context_token_s=rest[2]
            ),
            num_samples=self.num_samples,
            r_squared=1.0 - self._sum_rr / variance if variance > 0 else 0.0,
            residual_s=self._residual,
            sequences_seen=sequences,
            prefill_tokens_seen=prefill,
            context_tokens_seen=context,
        )

    def _learn(self, x: list[float], y: float) -> None:
        self.num_samples += 1
        weight, share = 1.0, 1.0
        if self.num_samples > _MIN_SAMPLES:
            if self.num_samples % 10 == 1:
                self._solve()
            expected = sum(a * b for a, b in zip(self._solution, x, strict=True))
            residual, expected = abs(y - expected), max(expected, 1e-6)
            weight = self._outlier_weight(residual / expected)
            self._residual += _LEARN * (min(residual, 10 * (self._residual or residual)) - self._residual)
            self._sum_rr = _FORGET * self._sum_rr + weight * residual**2
            share = min(10.0, self._sum_y / self._weight / expected) ** 2
        self._weight = _FORGET * self._weight + weight
        self._sum_y = _FORGET * self._sum_y + weight * y
        self._sum_yy = _FORGET * self._sum_yy + weight * y * y
        weight *= share
        for i in range(4):
            self._vector[i] = _FORGET * self._vector[i] + weight * x[i] * y
            row = self._matrix[i]
            for j in range(4):
                row[j] = _FORGET * row[j] + weight * x[i] * x[j]

    def _outlier_weight(self, relative: float) -> float:
        """What a step counts whose residual is so large a part of its time; notes how large that typically is."""
        typical = self._relative
        self._relative += _LEARN * (min(relative, 10 * (typical or relative)) - typical)
        return _HUBER * typical / relative if typical and relative > _HUBER * typical else 1.0

    def _solve(self) -> None:
        """Least squares with no coefficient below zero, since no work makes a step shorter; the worst goes in turn."""
        kept = [0, 1, 2, 3]
        while True:
            solution = self._solve_for(kept)
            worst = min(kept, key=lambda i: solution[i])
            if solution[worst] >= 0:
                self._solution = solution
                return
            kept.remove(worst)

    def _solve_for(self, kept: list[int]) -> list[float]:
        """The coefficients of some of the features, the others being zero."""
        matrix = [[self._matrix[i][j] + _RIDGE * (i == j) for j in kept] for i in kept]
        solved = solve(matrix, [self._vector[i] + _RIDGE * self._solution[i] for i in kept])
        solution = [0.0] * 4
        for i, value in zip(kept, solved, strict=True):
            solution[i] = value
        return solution


def _features(shape: StepShape) -> list[float]:
    values = (1.0, shape.num_sequences, shape.num_prefill_tokens, shape.num_context_tokens)
    return [value / scale for value, scale in zip(values, _SCALES, strict=True)]


def solve(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    """Solve a small symmetric positive definite system by Cholesky decomposition."""
    size = len(vector)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(lower[i][k] * lower[j][k] for k in range(j))
            lower[i][j] = math.sqrt(rest) if i == j else rest / lower[j][j]
    forward: list[float] = []
    for i in range(size):
        forward.append((vector[i] - sum(lower[i][k] * forward[k] for k in range(i))) / lower[i][i])
    result = [0.0] * size
    for i in reversed(range(size)):
        result[i] = (forward[i] - sum(lower[k][i] * result[k] for k in range(i + 1, size))) / lower[i][i]
    return result
