"""How long a step takes: `step = d + s·sequences + p·prefill tokens + a·context tokens`. Times in seconds."""

import msgspec


class StepShape(msgspec.Struct, frozen=True, gc=False):
    """What a step's time depends on."""

    num_sequences: int
    """Requests scheduled."""
    num_prefill_tokens: int
    """Tokens beyond one per decoding request."""
    num_context_tokens: int
    """Context tokens attended to, summed over the requests."""


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


PAPER_MODEL = StepModel(base_s=0.008, per_sequence_s=0.00006, per_prefill_token_s=0.00002)
"""8 ms + 0.06 ms per sequence + 20 ms per 1,000 prefill tokens."""
