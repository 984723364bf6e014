"""The seam to a grammar library. Torch-free: the real backend lives beside the runner, which applies the bitmasks."""

from collections.abc import MutableSequence
from typing import Protocol, runtime_checkable


class GrammarState(Protocol):
    """Where one request stands in its grammar. Owned by the runner, which samples in order: with steps in flight it
    alone knows the last token."""

    def fill_bitmask(self, words: MutableSequence[int]) -> None:
        """Set bit i of the 32-bit words (bit i % 32 of word i // 32) for each token i that may come next."""

    def accept(self, token_id: int) -> bool:
        """Move on by one token; False if the grammar forbids it (nothing changes then)."""

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete: only an end-of-sequence token may follow."""


class CompiledGrammar(Protocol):
    """A grammar ready for use by any number of requests."""

    def new_state(self) -> GrammarState:
        """A state at the start of an output."""


class GrammarBackend(Protocol):
    """Turns JSON schemas into grammars."""

    def compile(self, schema: str) -> CompiledGrammar:
        """Compile a JSON schema (text). Slow; called in a worker thread. Raises `ValueError` for a bad schema."""


@runtime_checkable
class LoadedLate(Protocol):
    """A backend whose library takes seconds to load: that is done when the first grammar is asked for."""

    @property
    def is_loaded(self) -> bool:
        """Whether `compile` begins at once."""

    def load(self) -> None:
        """Load it; slow, called in worker threads; idempotent. Raises what importing raises."""
