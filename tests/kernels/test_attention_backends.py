"""Every attention backend against the float64 reference, on random batches of prefill chunks and decodes.

The reference itself is checked against dense attention with an explicit mask, written down separately here.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schedtop.kernels.attention import AttentionBackend, AttentionMeta, AttentionSpec
from schedtop.kernels.cpu import CpuAttention, supported_isas
from schedtop.kernels.reference import ReferenceAttention
from schedtop.kernels.sdpa import SdpaAttention

BACKENDS: dict[str, AttentionBackend] = {
    "sdpa": SdpaAttention(),
    **{f"cpu-{isa}": CpuAttention(isa) for isa in supported_isas()},
}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-5}
"""Largest error allowed, of values around 1: the same cache contents are given to both sides."""


@dataclass(frozen=True)
class Case:
    """A random step: per request (tokens computed before, new tokens)."""

    requests: tuple[tuple[int, int], ...]
    num_kv_heads: int
    group: int
    head_size: int
    block_size: int
    window: int | None
    dtype: torch.dtype
    seed: int


cases = st.builds(
    Case,
    requests=st.lists(
        st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(2, 40))), min_size=1, max_size=6
    ).map(tuple),
    num_kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 3, 7, 9]),
    head_size=st.sampled_from([16, 64, 80, 128]),
    block_size=st.sampled_from([1, 8, 16, 32, 256]),
    window=st.sampled_from([None, 1, 5, 16, 33]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 1 << 30),
)


@dataclass
class Step:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache: torch.Tensor
    meta: AttentionMeta


def make_step(case: Case) -> Step:
    """Blocks of the requests are scattered over the pool; the cache holds noise wherever nobody may look."""
    generator = torch.Generator().manual_seed(case.seed)
    query_lens = [new for _, new in case.requests]
    seq_lens = [old + new for old, new in case.requests]
    num_blocks = [-(-length // case.block_size) for length in seq_lens]
    order = torch.randperm(sum(num_blocks) + 3, generator=generator).tolist()
    table = torch.randint(0, len(order), (len(seq_lens), max(num_blocks)), generator=generator, dtype=torch.int32)
    slots = []
    for row, (count, seq_len, query_len) in enumerate(zip(num_blocks, seq_lens, query_lens, strict=True)):
        blocks = [order.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(blocks, dtype=torch.int32)
        slots += [
            blocks[at // case.block_size] * case.block_size + at % case.block_size
            for at in range(seq_len - query_len, seq_len)
        ]
    num_tokens, num_heads = sum(query_lens), case.num_kv_heads * case.group
    qkv = torch.randn(num_tokens, num_heads + 2 * case.num_kv_heads, case.head_size, generator=generator)
    q, k, v = torch.split(qkv, [num_heads, case.num_kv_heads, case.num_kv_heads], dim=1)
    shape = (2, sum(num_blocks) + 3, case.block_size, case.num_kv_heads, case.head_size)
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    meta = AttentionMeta(
        query_start_loc=starts.int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=table,
        slot_mapping=torch.tensor(slots),
        query_lens=query_lens,
        context_lens=seq_lens,
    )
    return Step(q, k, v, torch.randn(shape, generator=generator).to(case.dtype), meta)


def attend(backend: AttentionBackend, step: Step, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and the cache afterwards; the step itself stays as it was."""
    cache = step.cache.clone()
    out = backend.attend(step.q, step.k, step.v, cache, replace(step.meta, prepared={}), window)
    return out, cache


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=40, deadline=None)
@given(case=cases)
def test_backend_equals_the_reference(name: str, case: Case) -> None:
    step = make_step(case)
    expected, cache = attend(ReferenceAttention(), step, case.window)
    found, cache_found = attend(BACKENDS[name], step, case.window)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=TOLERANCE[case.dtype])
    assert torch.equal(cache_found, cache)


@settings(max_examples=40, deadline=None)
@given(case=cases)
def test_reference_equals_dense_attention_under_a_mask(case: Case) -> None:
    step = make_step(replace(case, dtype=torch.float32))
    found, cache = attend(ReferenceAttention(), step, case.window)
    start = 0
    for row, (old, new) in enumerate(case.requests):
        slots = [
            int(step.meta.block_table[row, at // case.block_size]) * case.block_size + at % case.block_size
            for at in range(old + new)
        ]
        keys, values = cache.flatten(1, 2)[:, slots].double().repeat_interleave(case.group, dim=2)
        q = step.q[start : start + new].double()
        mask = torch.ones(new, old + new, dtype=torch.bool).tril(diagonal=old)
        if case.window is not None:
            mask &= torch.ones(new, old + new, dtype=torch.bool).triu(diagonal=old - case.window + 1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) / case.head_size**0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
        dense = torch.einsum("hqk,khd->qhd", weights, values)
        torch.testing.assert_close(found[start : start + new].double(), dense, rtol=0.0, atol=1e-6)
        start += new


@pytest.mark.skipif(not supported_isas(), reason="built without a C++ compiler")
@pytest.mark.parametrize("isa", supported_isas())
def test_compiled_kernel_keeps_large_scores_apart(isa: str) -> None:
    """Scores in the hundreds overflow a softmax that doesn't subtract the largest."""
    case = Case(((30, 20), (49, 1)), 1, 3, 64, 16, None, torch.float32, 7)
    step = make_step(case)
    step.q.mul_(40.0)
    expected, _ = attend(ReferenceAttention(), step, None)
    found, _ = attend(CpuAttention(isa), step, None)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-3)


@pytest.mark.skipif(not supported_isas(), reason="built without a C++ compiler")
def test_compiled_kernel_refuses_what_it_cannot_do_by_name() -> None:
    spec = AttentionSpec(
        device="cpu", num_heads=8, num_kv_heads=8, head_size=64, block_size=16, cache_dtype=torch.float16
    )
    backend = CpuAttention()
    assert backend.refuses(spec) is None
    assert "head size 72" in str(backend.refuses(replace(spec, head_size=72)))
    assert "bfloat16" in str(backend.refuses(replace(spec, cache_dtype=torch.bfloat16)))
    assert "cuda" in str(backend.refuses(replace(spec, device="cuda")))
    assert "128 query heads" in str(backend.refuses(replace(spec, num_heads=128, num_kv_heads=1)))
