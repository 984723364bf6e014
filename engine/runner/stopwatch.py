"""Where a step's time goes: products, attention, sampling. For benchmarks; without one nothing is measured."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from schedtop.engine.runner.models.linear import Linear, MakeLinear
from schedtop.kernels.attention import AttentionBackend, AttentionMeta, AttentionSpec


class Stopwatch:
    """Adds up seconds by what they were spent on. Times the host: on a GPU it sees launches only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Count the time inside."""
        start = time.perf_counter()
        yield
        self.seconds[what] += time.perf_counter() - start

    def linear(self, make: MakeLinear) -> MakeLinear:
        """The same products, timed."""

        def make_timed(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
            product = make(weight, bias)

            def timed(x: torch.Tensor) -> torch.Tensor:
                with self.span("matmul"):
                    return product(x)

            return timed

        return make_timed

    def attention(self, backend: AttentionBackend) -> AttentionBackend:
        """The same backend, timed."""
        return _TimedAttention(backend, self)


class _TimedAttention:
    def __init__(self, backend: AttentionBackend, watch: Stopwatch) -> None:
        self.name = backend.name
        self._backend = backend
        self._watch = watch

    def refuses(self, spec: AttentionSpec) -> str | None:
        return self._backend.refuses(spec)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: AttentionMeta,
        window: int | None = None,
    ) -> torch.Tensor:
        with self._watch.span("attention"):
            return self._backend.attend(q, k, v, kv_cache, meta, window)


class NoStopwatch(Stopwatch):
    """Measures nothing and costs nothing."""

    @contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Just do it."""
        yield

    def linear(self, make: MakeLinear) -> MakeLinear:
        """The products themselves."""
        return make

    def attention(self, backend: AttentionBackend) -> AttentionBackend:
        """The backend itself."""
        return backend
