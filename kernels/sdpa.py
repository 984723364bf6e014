"""Attention in pure torch, any device: decodes batched by a padded gather, prefills one by one through SDPA.

Run so far on the CPU only.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812

from schedtop.kernels.attention import AttentionMeta, AttentionSpec, gather_kv, store_kv


@dataclass(slots=True)
class _Decodes:
    """The requests with one query: where they stand, which blocks they read, which slots count."""

    rows: torch.Tensor
    """int64 [num_decodes]: index into the flat tokens."""
    blocks: torch.Tensor
    """int64 [num_decodes, max_blocks]"""
    mask: torch.Tensor
    """bool [num_decodes, 1, 1, max_blocks * block_size]"""


class SdpaAttention:
    """Works wherever torch does; computes in q's dtype."""

    name = "sdpa"

    def refuses(self, spec: AttentionSpec) -> str | None:
        """Nothing."""
        return None

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_cache: torch.Tensor,
        meta: AttentionMeta,
        window: int | None = None,
    ) -> torch.Tensor:
        """See `attention.py`."""
        store_kv(k, v, kv_cache, meta.slot_mapping)
        out = torch.empty_like(q)
        self._attend_decodes(q, kv_cache, meta, window, out)
        attend_prefills(q, kv_cache, meta, window, out)
        return out

    def _attend_decodes(
        self, q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMeta, window: int | None, out: torch.Tensor
    ) -> None:
        decodes = _decodes(meta, kv_cache.shape[2], window)
        if decodes is None:
            return
        gathered = kv_cache[:, decodes.blocks].flatten(2, 3).to(q.dtype)  # [2, n, padded, num_kv_heads, head_size]
        keys, values = gathered.transpose(2, 3)
        queries = q[decodes.rows].view(
            len(decodes.rows), keys.shape[1], -1, q.shape[2]
        )  # [n, num_kv_heads, group, head_size]
        result = F.scaled_dot_product_attention(queries, keys, values, attn_mask=decodes.mask)
        out[decodes.rows] = result.flatten(1, 2)


def _decodes(meta: AttentionMeta, block_size: int, window: int | None) -> _Decodes | None:
    key = f"sdpa decodes, window {window}"
    if key not in meta.prepared:
        meta.prepared[key] = _find_decodes(meta, block_size, window)
    found: _Decodes | None = meta.prepared[key]
    return found


def _find_decodes(meta: AttentionMeta, block_size: int, window: int | None) -> _Decodes | None:
    rows = [row for row, query_len in enumerate(meta.query_lens) if query_len == 1]
    if not rows:
        return None
    device = meta.block_table.device
    index = torch.tensor(rows, device=device)
    num_blocks = -(-max(meta.context_lens[row] for row in rows) // block_size)
    lens = meta.seq_lens[index][:, None]
    positions = torch.arange(num_blocks * block_size, device=device)[None]
    mask = positions < lens
    if window is not None:
        mask &= positions >= lens - window
    blocks = meta.block_table[index, :num_blocks].long()
    # Entries past a request's own blocks are leftovers: read block 0 there, the mask hides it.
    blocks = blocks.masked_fill(torch.arange(num_blocks, device=device)[None] * block_size >= lens, 0)
    return _Decodes(meta.query_start_loc[index].long(), blocks, mask[:, None, None])


def attend_prefills(
    q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMeta, window: int | None, out: torch.Tensor
) -> None:
    """Fill `out` where a request has more than one query."""
    start = 0
    for row, (query_len, seq_len) in enumerate(zip(meta.query_lens, meta.context_lens, strict=True)):
        if query_len > 1:
            num_blocks = -(-seq_len // kv_cache.shape[2])
            keys, values = gather_kv(kv_cache, meta.block_table[row, :num_blocks].long(), seq_len)
            out[start : start + query_len] = _prefill(q[start : start + query_len], keys, values, window)
        start += query_len


def _prefill(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None) -> torch.Tensor:
    """One request's chunk: [query_len, num_heads, head_size] over its whole context."""
    query_len, seq_len = len(q), len(keys)
    mask = None
    if query_len != seq_len or (window is not None and window < seq_len):
        ends = torch.arange(seq_len - query_len, seq_len, device=q.device)[:, None]
        positions = torch.arange(seq_len, device=q.device)[None]
        mask = positions <= ends
        if window is not None:
            mask &= positions > ends - window
    result = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys.to(q.dtype).transpose(0, 1)[None],
        values.to(q.dtype).transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=True,
    )
    return result[0].transpose(0, 1)
