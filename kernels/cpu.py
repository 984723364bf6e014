"""Attention on the CPU by the compiled kernel in `csrc/`, where the package was built with a C++ compiler.

Plain pointers through ctypes. The library has no OpenMP runtime of its own: it is loaded after torch and uses torch's.
"""

import ctypes
from functools import lru_cache
from pathlib import Path

import torch

from schedtop.kernels.attention import AttentionMeta, AttentionSpec

ISA_NAMES = ("baseline", "avx2", "avx512")
LANES = 16
"""Head sizes must be a multiple of this."""


class CpuAttention:
    """The compiled kernel. `isa` forces an instruction set (tests); None = the best this machine has."""

    name = "cpu"

    def __init__(self, isa: str | None = None) -> None:
        self._isa = None if isa is None else ISA_NAMES.index(isa)

    def refuses(self, spec: AttentionSpec) -> str | None:
        """No library, no CPU, another cache type, or sizes beyond the kernel's limits."""
        library, obstacle = load_library()
        if library is None:
            return obstacle
        if spec.device != "cpu":
            return f"it computes on the CPU, not on {spec.device}"
        if spec.cache_dtype not in (torch.float32, torch.float16):
            return f"a {spec.cache_dtype} cache isn't supported; fp32 and fp16 are"
        most = library.schedtop_max_head_size()
        if spec.head_size % LANES or spec.head_size > most:
            return f"head size {spec.head_size} isn't a multiple of {LANES} up to {most}"
        group = spec.num_heads // spec.num_kv_heads
        if group > (most := library.schedtop_max_group()):
            return f"{group} query heads per KV head are more than its {most}"
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
        """See `attention.py`. q, k and v are fp32; heads of a token must lie side by side."""
        library, obstacle = load_library()
        assert library is not None, obstacle
        assert q.stride()[1:] == k.stride()[1:] == v.stride()[1:] == (q.shape[2], 1)
        assert q.dtype == k.dtype == v.dtype == torch.float32 and kv_cache.is_contiguous()
        _, _, block_size, num_kv_heads, head_size = kv_cache.shape
        out = torch.empty(q.shape)
        library.schedtop_paged_attention(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            kv_cache[0].data_ptr(),
            kv_cache[1].data_ptr(),
            meta.slot_mapping.data_ptr(),
            meta.block_table.data_ptr(),
            meta.query_start_loc.data_ptr(),
            meta.seq_lens.data_ptr(),
            len(q),
            q.stride(0),
            k.stride(0),
            v.stride(0),
            meta.block_table.stride(0),
            len(meta.query_lens),
            q.shape[1],
            num_kv_heads,
            head_size,
            block_size,
            window or 0,
            head_size**-0.5,
            kv_cache.dtype is torch.float16,
            library.schedtop_best_isa() if self._isa is None else self._isa,
            torch.get_num_threads(),
        )
        return out


@lru_cache(maxsize=1)
def load_library() -> tuple[ctypes.CDLL | None, str]:
    """The compiled library, or None and why there is none."""
    files = sorted(Path(__file__).parent.glob("_paged_attention*.so"))
    if not files:
        return None, "the compiled kernel isn't part of this installation (it was built without a C++ compiler)"
    try:
        library = ctypes.CDLL(str(files[0]))
    except OSError as error:
        return None, f"the compiled kernel can't be loaded ({error})"
    library.schedtop_paged_attention.argtypes = [  # as in csrc/paged_attention.cpp
        *[ctypes.c_void_p] * 10,
        *[ctypes.c_int64] * 5,
        *[ctypes.c_int32] * 6,
        ctypes.c_float,
        *[ctypes.c_int32] * 3,
    ]
    library.schedtop_paged_attention.restype = None
    return library, ""


def supported_isas() -> tuple[str, ...]:
    """Instruction sets that can be forced on this machine; empty without the library."""
    library, _ = load_library()
    return () if library is None else ISA_NAMES[: library.schedtop_best_isa() + 1]
