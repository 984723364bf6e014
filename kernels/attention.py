"""The one attention seam: what a step tells every backend, what every backend must do, and how one is chosen.

Contract. `q` is [num_tokens, num_heads, head_size], `k` and `v` [num_tokens, num_kv_heads, head_size], the tokens of
all requests of the step one after the other, prefill chunks and decodes mixed, without padding. A layer's cache is
[2, num_blocks, block_size, num_kv_heads, head_size], keys first. The new k and v are written to `slot_mapping` first;
then query i of a request with `query_len` new tokens attends to the positions 0 .. seq_len - query_len + i of its
`seq_len` tokens, found through its row of the block table (bottom-right alignment), or with a sliding window of w to
the last w of those. Query head h reads KV head h * num_kv_heads // num_heads. Output: [num_tokens, num_heads,
head_size], in q's dtype, whatever the cache's. Nothing outside this package calls an attention kernel.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch


@dataclass(slots=True)
class AttentionMeta:
    """Who is in the step's flat batch. Built once per step, shared by all layers."""

    query_start_loc: torch.Tensor
    """int32 [num_reqs + 1]: where each request's queries start, then the number of tokens."""
    seq_lens: torch.Tensor
    """int32 [num_reqs]: context with this step's tokens included."""
    block_table: torch.Tensor
    """int32 [num_reqs, max_blocks]: row i's first ceil(seq_len / block_size) entries are its blocks."""
    slot_mapping: torch.Tensor
    """int64 [num_tokens]: block * block_size + offset at which each token's k and v are stored."""
    query_lens: list[int]
    context_lens: list[int]
    """`seq_lens` on the host: plans need no copy back from a device."""
    prepared: dict[str, Any] = field(default_factory=dict)
    """What a backend works out once per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What a backend is asked to handle."""

    device: str
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    cache_dtype: torch.dtype
    has_window: bool = False


class AttentionBackend(Protocol):
    """One implementation of the contract above."""

    name: str

    def refuses(self, spec: AttentionSpec) -> str | None:
        """Why it can't do `spec` here, in words that name the value and the limit; None = it can."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: AttentionMeta,
        window: int | None = None,
    ) -> torch.Tensor:
        """Store k and v, then attend. `kv_cache` is one layer's; see the contract."""
        ...


def store_kv(k: torch.Tensor, v: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write new keys and values to their slots: the pure torch way, any device."""
    flat = kv_cache.flatten(1, 2)  # [2, num_blocks * block_size, num_kv_heads, head_size]
    flat[0].index_copy_(0, slot_mapping, k.to(kv_cache.dtype))
    flat[1].index_copy_(0, slot_mapping, v.to(kv_cache.dtype))


def gather_kv(kv_cache: torch.Tensor, blocks: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A request's keys and values in order, each [num_tokens, num_kv_heads, head_size]."""
    flat = kv_cache[:, blocks].flatten(1, 2)[:, :num_tokens]
    return flat[0], flat[1]
