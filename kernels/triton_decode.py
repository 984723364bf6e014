"""Requests with one query each, straight from blocks of any size, in Triton.

One program per request and KV head: all query heads that share the KV head go over its blocks once. Runs on CUDA, and
on any machine in Triton's interpreter (`TRITON_INTERPRET=1`), which is how it is tested without a GPU
and the only way it has been run so far.
"""

import os
from importlib import import_module
from importlib.util import find_spec

import torch

from schedtop.kernels.attention import AttentionMeta, AttentionSpec


class TritonDecode:
    """The decode half of an attention backend: fills only the rows of requests with one query."""

    def refuses(self, spec: AttentionSpec) -> str | None:
        """No Triton, or a CPU without its interpreter."""
        if find_spec("triton") is None:
            return "triton isn't installed"
        if spec.device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return f"triton computes on CUDA, not on {spec.device} (but for its interpreter, TRITON_INTERPRET=1)"
        return None

    def attend(
        self, q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMeta, window: int | None, out: torch.Tensor
    ) -> None:
        """Fill `out` [num_tokens, num_heads, head_size] where a request has one query."""
        rows = decode_rows(meta)
        if not len(rows):
            return
        _, _, block_size, num_kv_heads, head_size = kv_cache.shape
        group = q.shape[1] // num_kv_heads
        import_module("schedtop.kernels.triton_source").decode[(len(rows), num_kv_heads)](
            q,
            kv_cache[0],
            kv_cache[1],
            out,
            rows,
            meta.query_start_loc,
            meta.seq_lens,
            meta.block_table,
            head_size**-0.5,
            window or 0,
            q.stride(0),
            out.stride(0),
            kv_cache.stride(2),
            meta.block_table.stride(0),
            GROUP=group,
            HEAD_SIZE=head_size,
            BLOCK_SIZE=block_size,
            GROUP_PADDED=max(16, _power_of_two(group)),
            HEAD_PADDED=_power_of_two(head_size),
            KEYS=max(16, min(64, _power_of_two(block_size))),
        )


def decode_rows(meta: AttentionMeta) -> torch.Tensor:
    """int32: the requests with one query, worked out once per step."""
    if "triton rows" not in meta.prepared:
        rows = [row for row, query_len in enumerate(meta.query_lens) if query_len == 1]
        meta.prepared["triton rows"] = torch.tensor(rows, dtype=torch.int32, device=meta.seq_lens.device)
    found: torch.Tensor = meta.prepared["triton rows"]
    return found


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
