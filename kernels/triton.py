"""CUDA without flash-attn: the Triton kernel for decodes, torch's SDPA for prefill chunks.

Run so far in Triton's interpreter only, on the CPU; never compiled, never on a GPU. `make test-gpu` does that, on CUDA.
"""

import torch

from schedtop.kernels.attention import AttentionMeta, AttentionSpec, store_kv
from schedtop.kernels.sdpa import attend_prefills
from schedtop.kernels.triton_decode import TritonDecode


class TritonAttention:
    """See `attention.py` for the contract."""

    name = "triton"

    def __init__(self) -> None:
        self._decode = TritonDecode()

    def refuses(self, spec: AttentionSpec) -> str | None:
        """Where the decode kernel can't run."""
        return self._decode.refuses(spec)

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
        self._decode.attend(q, kv_cache, meta, window, out)
        attend_prefills(q, kv_cache, meta, window, out)
        return out
