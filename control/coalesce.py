"""Tokens waiting for a slow reader: joined per request, so that what waits grows with the text, not with the steps.

Used on both sides of the socket. Pure data; nothing here sends or waits.
"""

from collections.abc import Iterable

from schedtop.control.messages import TokenBatch, TokenOutput


class TokenBuffer:
    """Outputs of several requests in order of their first waiting token."""

    def __init__(self) -> None:
        self._parts: dict[str, list[TokenOutput]] = {}
        self._step = 0
        self.num_units = 0
        """Tokens and log-probabilities held: what memory goes by."""

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, step: int, outputs: Iterable[TokenOutput]) -> None:
        """Append one step's outputs."""
        self._step = step
        for output in outputs:
            self._parts.setdefault(output.request_id, []).append(output)
            told = [*(output.logprobs or ()), *(output.prompt_logprobs or ())]
            self.num_units += 1 + len(output.token_ids) + sum(len(entry) for entry in told if entry)

    def take(self) -> TokenBatch:
        """All that waits, one output per request; empties the buffer."""
        batch = TokenBatch(step=self._step, outputs=[_join(parts) for parts in self._parts.values()])
        self._parts.clear()
        self.num_units = 0
        return batch


def _join(parts: list[TokenOutput]) -> TokenOutput:
    last = parts[-1]
    if len(parts) == 1:
        return last
    has_logprobs = any(part.logprobs is not None for part in parts)
    return TokenOutput(
        request_id=last.request_id,
        token_ids=[token for part in parts for token in part.token_ids],
        finish_reason=last.finish_reason,
        detail=last.detail,
        logprobs=[entry for part in parts for entry in part.logprobs or ()] if has_logprobs else None,
        num_cached_tokens=max(part.num_cached_tokens for part in parts),
        prompt_logprobs=next((part.prompt_logprobs for part in parts if part.prompt_logprobs is not None), None),
    )
