"""Draft tokens by n-gram lookup: what followed the last time the same few tokens stood in this context.

Source: prompt lookup decoding (Saxena, 2023). Torch-free; drafts only cost time when wrong, never correctness.
"""

from collections.abc import Callable, Sequence

Proposer = Callable[[Sequence[int], int], list[int]]
"""Takes all known tokens and the number wanted; returns at most so many drafts."""


def propose_ngram(
    token_ids: Sequence[int], num_drafts: int, max_n: int = 4, min_n: int = 2, window: int = 2048
) -> list[int]:
    """Drafts after the latest earlier occurrence of the longest suffix of `min_n` to `max_n` tokens.

    Looks back `window` tokens, so the cost per call is bounded. Empty when nothing matches.
    """
    tokens = list(token_ids[-window:])
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        suffix = tokens[-n:]
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start] == suffix[0] and tokens[start : start + n] == suffix:
                return tokens[start + n : start + n + num_drafts]
    return []
