"""Attention as the contract states it, in float64, in a loop one can read. For tests: right, not fast."""

import torch

from schedtop.kernels.attention import AttentionMeta, AttentionSpec, gather_kv, store_kv


class ReferenceAttention:
    """The yardstick of all other backends."""

    name = "reference"

    def refuses(self, spec: AttentionSpec) -> str | None:
        """Nothing: it takes every shape, on any device with float64."""
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
        start = 0
        for row, (query_len, seq_len) in enumerate(zip(meta.query_lens, meta.context_lens, strict=True)):
            num_blocks = -(-seq_len // kv_cache.shape[2])
            keys, values = gather_kv(kv_cache, meta.block_table[row, :num_blocks].long(), seq_len)
            for i in range(query_len):
                position = seq_len - query_len + i
                first = 0 if window is None else max(0, position - window + 1)
                seen = slice(first, position + 1)
                out[start + i] = attend_one(q[start + i], keys[seen], values[seen])
            start += query_len
        return out


def attend_one(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[num_heads, head_size] over [n, num_kv_heads, head_size] -> [num_heads, head_size], computed in float64."""
    num_heads, head_size = query.shape
    group = num_heads // keys.shape[1]
    outputs = []
    for head in range(num_heads):
        scores = keys[:, head // group].double() @ query[head].double() / head_size**0.5
        outputs.append(torch.softmax(scores, dim=0) @ values[:, head // group].double())
    return torch.stack(outputs).to(query.dtype)
