"""Draft tokens by n-gram lookup: what followed the last time the same few tokens stood in this context.

Source: prompt lookup decoding (Saxena, 2023). Torch-free; drafts only cost time when wrong, never correctness.
"""

from array import array
from collections.abc import Callable, Sequence

Proposer = Callable[[Sequence[int], int], list[int]]
"""Takes all known tokens and the number wanted; returns at most so many drafts."""

_TOKEN_BYTES = 8


def propose_ngram(
    token_ids: Sequence[int], num_drafts: int, max_n: int = 4, min_n: int = 2, window: int = 2048
) -> list[int]:
    """Drafts after the latest earlier occurrence of the longest suffix of `min_n` to `max_n` tokens.

    Looks back `window` tokens, so the cost per call is bounded. Empty when nothing matches.
    """
    tokens = array("q", token_ids[-window:])
    packed = tokens.tobytes()
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        start = _last_occurrence(packed, n)
        if start is not None:
            return tokens[start + n : start + n + num_drafts].tolist()
    return []


def _last_occurrence(packed: bytes, n: int) -> int | None:
    """Where the last `n` tokens stood before, the latest time; the search runs over bytes, which is fast."""
    suffix = packed[-n * _TOKEN_BYTES :]
    place = packed.rfind(suffix, 0, len(packed) - _TOKEN_BYTES)
    while place % _TOKEN_BYTES:  # a match that starts inside a token; -1, nothing found, lands here too
        if place < 0:
            return None
        place = packed.rfind(suffix, 0, place + len(suffix) - 1)
    return place // _TOKEN_BYTES
