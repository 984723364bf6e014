"""LoRA adapters beside the model's own products: each row of the flat batch gets its request's adapter, or none.

Per step the rows are sorted out once (`route`); then each product adds, per adapter that is in the batch, the low-rank
change of its rows. Products that no adapter touches stay as they are. Files are read in `loader/peft.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from schedtop.engine.runner.loader.peft import LoraAdapter, LoraPair
from schedtop.engine.runner.models.linear import Linear


@dataclass(slots=True)
class _Change:
    """What an adapter adds to a product, fused as the product is."""

    a: torch.Tensor
    """[sum of ranks, in_features]"""
    b: torch.Tensor
    """[out_features, sum of ranks]: each part's B in its own rows and columns, zero elsewhere."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, self.a), self.b)


class AdapterRows:
    """Whose adapter each row of the flat batch gets. It changes with every step, so one step runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.routes: list[tuple[str, torch.Tensor | None]] = []
        """Adapters in the batch and their rows, int64; None = all rows."""

    def route(self, adapters: Sequence[str | None], query_lens: Sequence[int]) -> None:
        """Say whose adapter the rows of the coming forward pass are for: one name and row count per request."""
        self.routes.clear()
        starts = [sum(query_lens[:index]) for index in range(len(query_lens))] if any(adapters) else []
        for name in dict.fromkeys(filter(None, adapters)):
            spans = [
                torch.arange(start, start + count)
                for start, count, owner in zip(starts, query_lens, adapters, strict=True)
                if owner == name
            ]
            rows = torch.cat(spans)
            self.routes.append((name, None if len(rows) == sum(query_lens) else rows.to(self._device)))


class AdapterBuilder:
    """Puts adapters beside the products of a model while it is built; not needed any more afterwards."""

    def __init__(
        self, adapters: Sequence[LoraAdapter], rows: AdapterRows, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._adapters = adapters
        self._rows = rows
        self._device, self._dtype = device, dtype

    def extend(self, product: Linear, modules: Sequence[tuple[str, int]]) -> Linear:
        """A product of these modules (names and output sizes) side by side, with what adapters change of them."""
        changes = {
            adapter.name: self._fuse(adapter.pairs, modules)
            for adapter in self._adapters
            if any(name in adapter.pairs for name, _ in modules)
        }
        return _ChangedLinear(product, changes, self._rows) if changes else product

    def _fuse(self, pairs: Mapping[str, LoraPair], modules: Sequence[tuple[str, int]]) -> _Change:
        found = [(pairs.get(name), size) for name, size in modules]
        a = torch.cat([pair.a for pair, _ in found if pair is not None])
        blocks = [torch.zeros(size, 0) if pair is None else pair.b for pair, size in found]
        b: torch.Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
        return _Change(a.to(self._device, self._dtype), b.to(self._device, self._dtype))


class _ChangedLinear:
    def __init__(self, product: Linear, changes: Mapping[str, _Change], rows: AdapterRows) -> None:
        self._product = product
        self._changes = changes
        self._rows = rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = self._product(x)
        for name, rows in self._rows.routes:
            change = self._changes.get(name)
            if change is None:
                continue
            if rows is None:
                out += change(x)
            else:
                out.index_add_(0, rows, change(x[rows]))
        return out
