"""FlashAttention on CUDA through the `flash-attn` package: one paged call for the whole mixed batch.

FlashAttention 2's paged calls want blocks of a multiple of 256 tokens. With smaller ones decodes go to the Triton
kernel and the context of prefills is gathered first. The package is imported when it is first needed.

Never run so far, neither in tests nor on a GPU: only its refusals are tested. `make test-gpu` compares it, on CUDA.
"""

from functools import lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from schedtop.kernels.attention import AttentionMeta, AttentionSpec, gather_kv, store_kv
from schedtop.kernels.triton_decode import TritonDecode

PAGE_MULTIPLE = 256
"""Tokens per block that flash-attn 2's paged calls want a multiple of (its interface checks it)."""
OLDEST = (2, 5, 7)
"""First version whose variable-length call takes a block table."""
LARGEST_HEAD = 256


@lru_cache(maxsize=1)
def flash_version() -> tuple[int, ...] | None:
    """The installed flash-attn 2's version, or None."""
    try:
        return tuple(int(part) for part in version("flash-attn").split("+")[0].split(".")[:3] if part.isdigit())
    except PackageNotFoundError:
        return None


class FlashAttention:
    """See `attention.py` for the contract. Computes in fp16 or bf16."""

    name = "flash"

    def __init__(self) -> None:
        self._decode = TritonDecode()

    def refuses(self, spec: AttentionSpec) -> str | None:
        """No CUDA, no flash-attn, or sizes and types beyond it."""
        installed = flash_version()
        if spec.device != "cuda":
            return f"flash-attn computes on CUDA, not on {spec.device}"
        if installed is None:
            return "flash-attn isn't installed: pip install schedtop[flash]"
        if installed < OLDEST:
            return f"flash-attn {'.'.join(map(str, installed))} is older than {'.'.join(map(str, OLDEST))}: upgrade it"
        if spec.cache_dtype not in (torch.float16, torch.bfloat16):
            return f"flash-attn computes in fp16 and bf16, not in {spec.cache_dtype}: choose dtype fp16 or bf16"
        if spec.head_size > LARGEST_HEAD or spec.head_size % 8:
            return f"head size {spec.head_size} isn't a multiple of 8 up to {LARGEST_HEAD}"
        if spec.block_size % PAGE_MULTIPLE and (reason := self._decode.refuses(spec)) is not None:
            return (
                f"its paged calls want blocks of a multiple of {PAGE_MULTIPLE} tokens, not {spec.block_size}, and the "
                f"decode kernel for smaller ones is out ({reason}): start with --block-size {PAGE_MULTIPLE}"
            )
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
        if kv_cache.shape[2] % PAGE_MULTIPLE == 0:
            return self._attend_paged(q, kv_cache, meta, window)
        out = torch.empty_like(q)
        self._decode.attend(q, kv_cache, meta, window, out)
        self._attend_gathered(q, kv_cache, meta, window, out)
        return out

    def _attend_paged(
        self, q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMeta, window: int | None
    ) -> torch.Tensor:
        """Prefill chunks and decodes alike, straight from the blocks."""
        return _varlen(
            q, kv_cache[0], kv_cache[1], meta.query_lens, meta.context_lens, window, meta.prepared, meta.block_table
        )

    def _attend_gathered(
        self, q: torch.Tensor, kv_cache: torch.Tensor, meta: AttentionMeta, window: int | None, out: torch.Tensor
    ) -> None:
        """Prefill chunks: their whole contexts, one after the other, are copied out of the blocks first."""
        rows = [row for row, query_len in enumerate(meta.query_lens) if query_len > 1]
        if not rows:
            return
        block_size = kv_cache.shape[2]
        starts = [sum(meta.query_lens[:row]) for row in rows]
        query_lens, seq_lens = [meta.query_lens[row] for row in rows], [meta.context_lens[row] for row in rows]
        tokens = torch.cat([torch.arange(at, at + n) for at, n in zip(starts, query_lens, strict=True)]).to(q.device)
        contexts = [
            gather_kv(kv_cache, meta.block_table[row, : -(-seq_len // block_size)].long(), seq_len)
            for row, seq_len in zip(rows, seq_lens, strict=True)
        ]
        keys, values = (torch.cat(parts) for parts in zip(*contexts, strict=True))
        out[tokens] = _varlen(q[tokens], keys, values, query_lens, seq_lens, window, meta.prepared)


def _varlen(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    query_lens: list[int],
    seq_lens: list[int],
    window: int | None,
    prepared: dict[str, Any],
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """flash-attn's variable-length call; causal, aligned at the bottom right (its rule since 2.1)."""
    if "flash lens" not in prepared:
        sums = [
            torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32) for lens in (query_lens, seq_lens)
        ]
        prepared["flash lens"] = [lens.to(q.device) for lens in sums]
    starts_q, starts_k = prepared["flash lens"]
    out: torch.Tensor = import_module("flash_attn").flash_attn_varlen_func(
        q.to(keys.dtype),
        keys,
        values,
        starts_q,
        starts_k,
        max(query_lens),
        max(seq_lens),
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        block_table=block_table,
    )
    return out.to(q.dtype)
