"""When a request ends. A stop condition looks at a request to which one token has just been appended.

Stop strings are not here: they live where the text is, in the front end.
"""

from collections.abc import Callable, Sequence

from schedtop.engine.config import EngineConfig
from schedtop.engine.request import Request
from schedtop.engine.snapshot import FinishReason

StopCondition = Callable[[Request], FinishReason | None]


def stop_by_token_or_length(request: Request) -> FinishReason | None:
    """EOS or a stop token (not before min_tokens), then max_tokens and max_model_len."""
    if request.token_ids[-1] in request.stop_token_ids and request.num_output_tokens >= request.sampling.min_tokens:
        return FinishReason.STOP
    if len(request.token_ids) >= request.max_total_tokens:
        return FinishReason.LENGTH
    return None


def stop_by_repetition(max_pattern: int, min_count: int) -> StopCondition:
    """End an output whose last tokens are a pattern of up to `max_pattern` tokens, `min_count` times in a row."""

    def condition(request: Request) -> FinishReason | None:
        output = request.output_token_ids
        if any(_ends_in_repetition(output, size, min_count) for size in range(1, max_pattern + 1)):
            return FinishReason.REPETITION
        return None

    return condition


def _ends_in_repetition(tokens: Sequence[int], size: int, count: int) -> bool:
    tail = tokens[-size * count :]
    return len(tail) == size * count and all(tail[i] == tail[i % size] for i in range(size, len(tail)))


def stop_conditions(config: EngineConfig, extra: Sequence[StopCondition] = ()) -> list[StopCondition]:
    """Conditions besides token and length: the repetition stop when configured, then the caller's own."""
    conditions = list(extra)
    if config.repetition_max_pattern and config.repetition_min_count:
        conditions.insert(0, stop_by_repetition(config.repetition_max_pattern, config.repetition_min_count))
    return conditions
