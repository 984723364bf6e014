"""How a request wants its tokens sampled and when it ends. Torch-free: the scheduler and the wire use it too."""

import msgspec

from schedtop.engine.errors import RequestRefused


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling and stop settings, with vLLM's names and meanings.

    Stop strings are not here: the front end, which has the text, looks for them and aborts with reason `stop`.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = off."""
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    """Top log-probabilities returned per output token; None = none, 0 = the sampled token's only."""
    prompt_logprobs: int | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    grammar: str | None = None
    """A JSON schema (as text) that the output must follow; None = free."""

    def check(self) -> None:
        """Raise `RequestRefused` naming the first setting out of range, its value and its limits."""
        for name, low, high in (
            ("max_tokens", 1, 1 << 31),
            ("min_tokens", 0, self.max_tokens),
            ("temperature", 0.0, 100.0),
            ("top_k", 0, 1 << 31),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("logprobs", 0, 20),
            ("prompt_logprobs", 0, 20),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise RequestRefused(f"{name}={value} is outside its range {low} to {high}")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestRefused(f"top_p={self.top_p} is outside its range: above 0, at most 1")
        if not 0.0 < self.repetition_penalty <= 10.0:
            raise RequestRefused(
                f"repetition_penalty={self.repetition_penalty} is outside its range: above 0, at most 10"
            )
