"""The Triton kernel's source. Imports Triton, an extra, so only `triton_decode.py` imports this, on first use.

Constants are in capitals, as is the custom with Triton: each combination is compiled by itself.
"""
# ruff: noqa: N803

import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]


@triton.jit  # type: ignore[untyped-decorator]
def decode(  # type: ignore[no-untyped-def]
    q, keys, values, out, rows, starts, seq_lens, table,
    scale, window, q_stride, out_stride, slot_stride, table_stride,
    GROUP: tl.constexpr, HEAD_SIZE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    GROUP_PADDED: tl.constexpr, HEAD_PADDED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One request's single query, the `GROUP` heads of one KV head; see `triton_decode.py`."""
    row = tl.load(rows + tl.program_id(0))
    kv_head = tl.program_id(1)
    token = tl.load(starts + row).to(tl.int64)
    seq_len = tl.load(seq_lens + row)
    heads, dims = tl.arange(0, GROUP_PADDED), tl.arange(0, HEAD_PADDED)
    is_real = (heads[:, None] < GROUP) & (dims[None, :] < HEAD_SIZE)
    at = (kv_head * GROUP + heads)[:, None] * HEAD_SIZE + dims[None, :]
    query = tl.load(q + token * q_stride + at, mask=is_real, other=0.0).to(tl.float32) * scale
    best = tl.full([GROUP_PADDED], -1e30, tl.float32)
    total = tl.zeros([GROUP_PADDED], tl.float32)
    result = tl.zeros([GROUP_PADDED, HEAD_PADDED], tl.float32)
    first = 0
    if window > 0:
        first = tl.maximum(seq_len - window, 0) // KEYS * KEYS
    for start in range(first, seq_len, KEYS):
        positions = start + tl.arange(0, KEYS)
        is_seen = positions < seq_len
        if window > 0:
            is_seen = is_seen & (positions >= seq_len - window)
        blocks = tl.load(table + row * table_stride + positions // BLOCK_SIZE, mask=is_seen, other=0).to(tl.int64)
        slots = (blocks * BLOCK_SIZE + positions % BLOCK_SIZE) * slot_stride + kv_head * HEAD_SIZE
        wanted = is_seen[:, None] & (dims[None, :] < HEAD_SIZE)
        key = tl.load(keys + slots[:, None] + dims[None, :], mask=wanted, other=0.0).to(tl.float32)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        scores = tl.where(is_seen[None, :], scores, -1e30)
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.where(is_seen[None, :], tl.exp(scores - new_best[:, None]), 0.0)
        shrink = tl.exp(best - new_best)
        total = total * shrink + tl.sum(weights, 1)
        value = tl.load(values + slots[:, None] + dims[None, :], mask=wanted, other=0.0).to(tl.float32)
        result = result * shrink[:, None] + tl.dot(weights, value, input_precision="ieee")
        best = new_best
    result = result / total[:, None]
    tl.store(out + token * out_stride + at, result.to(out.dtype.element_ty), mask=is_real)
