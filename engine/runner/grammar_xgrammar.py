"""Structured output through xgrammar: JSON schemas become automata over the vocabulary.

Implements `engine/structured/backend.py`. Scheduling of builds is not here; nor is sampling, which applies the masks.
"""

import importlib.util
import re
import threading
from collections.abc import Callable, MutableSequence, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from schedtop.engine.runner.tokenizer import load_tokenizer

if TYPE_CHECKING:
    import xgrammar

MAX_WHITESPACE = 4
"""In a row, between the parts of a JSON text: small models like to go on with it for ever."""
_CACHE_BYTES = 256 << 20
_SOURCE_PLACE = re.compile(r"^\[[\d:]+\] \S+: (Check failed: \(.*?\) is false: )?")


class XGrammarBackend:
    """Compiles JSON schemas for one vocabulary.

    `vocabulary()[i]` is what token i adds to the text, special tokens empty; `logits_size` is how many columns the
    model has. Importing the library takes seconds of all threads' time: it waits until somebody wants a grammar.
    """

    def __init__(self, vocabulary: Callable[[], list[bytes]], logits_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._logits_size = logits_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._lock = threading.Lock()
        self._compiler: xgrammar.GrammarCompiler | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether `compile` begins at once."""
        return self._compiler is not None

    def load(self) -> None:
        """Import the library and tell it the vocabulary; idempotent, for any thread."""
        self._ready_compiler()

    def _ready_compiler(self) -> "xgrammar.GrammarCompiler":
        with self._lock:
            if self._compiler is None:
                import xgrammar

                info = xgrammar.TokenizerInfo(
                    self._vocabulary(),
                    xgrammar.VocabType.RAW,
                    vocab_size=self._logits_size,
                    stop_token_ids=sorted(self._eos_token_ids),
                )
                self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE_BYTES)
            return self._compiler

    def compile(self, schema: str) -> "CompiledSchema":
        """Compile a JSON schema. Raises `ValueError` for a bad one."""
        try:
            compiled = self._ready_compiler().compile_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)
        except RuntimeError as error:
            reason = _SOURCE_PLACE.sub("", str(error)).strip()
            raise ValueError(f"not a JSON schema that can be followed: {reason}") from None
        return CompiledSchema(compiled, self._eos_token_ids)


class CompiledSchema:
    """A schema's automaton, shared by all requests with this schema."""

    def __init__(self, compiled: "xgrammar.CompiledGrammar", eos_token_ids: frozenset[int]) -> None:
        self._compiled = compiled
        self._eos_token_ids = eos_token_ids

    def new_state(self) -> "SchemaState":
        """A state at the start of an output."""
        return SchemaState(self._compiled, self._eos_token_ids)


class SchemaState:
    """Where one output stands. After the end only end-of-sequence tokens are allowed, as many as are asked for."""

    def __init__(self, compiled: "xgrammar.CompiledGrammar", eos_token_ids: frozenset[int]) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._eos_token_ids = eos_token_ids

    def fill_bitmask(self, words: MutableSequence[int]) -> None:
        """Set the bits of the tokens that may come next; `words` is an int32 array."""
        mask = cast(np.ndarray[tuple[int], np.dtype[np.int32]], words)
        if self._matcher.is_terminated():
            mask[:] = 0
            for token in self._eos_token_ids:
                mask[token // 32] |= np.uint32(1 << token % 32).astype(np.int32)
        elif not self._matcher.fill_next_token_bitmask(mask.reshape(1, -1)):
            mask[:] = -1  # everything is allowed

    def accept(self, token_id: int) -> bool:
        """Move on by one token; False, and no change, if it isn't allowed."""
        if self._matcher.is_terminated():
            return token_id in self._eos_token_ids
        return bool(self._matcher.accept_token(token_id))

    @property
    def is_finished(self) -> bool:
        """Whether only an end-of-sequence token may follow."""
        return bool(self._matcher.is_terminated() or self._matcher.is_completed())


def backend_for(model: str, logits_size: int, eos_token_ids: Sequence[int]) -> XGrammarBackend | None:
    """A backend for the tokenizer of a model; None when xgrammar isn't installed."""

    def vocabulary() -> list[bytes]:
        tokenizer = load_tokenizer(model)
        tokens = range(tokenizer.vocab_size)
        return [b"" if tokenizer.is_special(token) else tokenizer.token_bytes(token) for token in tokens]

    if importlib.util.find_spec("xgrammar") is None:
        return None
    return XGrammarBackend(vocabulary, logits_size, eos_token_ids)
