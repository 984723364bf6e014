"""Every attention backend against the float64 reference, on random batches of prefill chunks and decodes.

The reference itself is checked against dense attention with an explicit mask, written down separately here.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schedtop.kernels.attention import AttentionBackend, AttentionMeta, AttentionSpec
from schedtop.kernels.cpu import CpuAttention, supported_isas
from schedtop.kernels.flash import FlashAttention, flash_version
from schedtop.kernels.reference import ReferenceAttention
from schedtop.kernels.sdpa import SdpaAttention
from schedtop.kernels.select import choose_backend
from schedtop.kernels.triton import TritonAttention

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


needs_kernel = pytest.mark.skipif(not supported_isas(), reason="built without a C++ compiler")


@needs_kernel
@pytest.mark.parametrize("isa", supported_isas())
def test_compiled_kernel_keeps_large_scores_apart(isa: str) -> None:
    """Scores in the hundreds overflow a softmax that doesn't subtract the largest."""
    case = Case(((30, 20), (49, 1)), 1, 3, 64, 16, None, torch.float32, 7)
    step = make_step(case)
    step.q.mul_(40.0)
    expected, _ = attend(ReferenceAttention(), step, None)
    found, _ = attend(CpuAttention(isa), step, None)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-3)


@needs_kernel
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


HAS_CUDA = torch.cuda.is_available()
CAN_TRITON = find_spec("triton") is not None and (HAS_CUDA or os.environ.get("TRITON_INTERPRET") == "1")
needs_triton = pytest.mark.skipif(not CAN_TRITON, reason="no CUDA, and TRITON_INTERPRET=1 isn't set (make test-gpu)")
needs_flash = pytest.mark.skipif(not HAS_CUDA or flash_version() is None, reason="no CUDA, or no flash-attn")


def to_device(step: Step, device: str) -> Step:
    meta = replace(
        step.meta,
        **{
            name: getattr(step.meta, name).to(device)
            for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
        },
    )
    q, k, v, cache = (tensor.to(device) for tensor in (step.q, step.k, step.v, step.cache))
    return Step(q, k, v, cache, meta)


@needs_triton
@settings(max_examples=12, deadline=None)
@given(case=cases)
def test_triton_equals_the_reference(case: Case) -> None:
    """On CUDA where there is one, else in Triton's interpreter."""
    step = make_step(replace(case, requests=case.requests[:3]))
    expected, _ = attend(ReferenceAttention(), step, case.window)
    found, _ = attend(TritonAttention(), to_device(step, "cuda" if HAS_CUDA else "cpu"), case.window)
    torch.testing.assert_close(found.cpu(), expected, rtol=0.0, atol=1e-4)


@needs_flash
@pytest.mark.parametrize("block_size", [16, 256])
@settings(max_examples=40, deadline=None)
@given(case=cases)
def test_flash_equals_the_reference(block_size: int, case: Case) -> None:
    """fp16 throughout, as flash-attn computes: the reference gets the same rounded inputs."""
    step = make_step(replace(case, block_size=block_size, dtype=torch.float16))
    step.q, step.k, step.v = (tensor.half() for tensor in (step.q, step.k, step.v))
    expected, _ = attend(ReferenceAttention(), step, case.window)
    found, _ = attend(FlashAttention(), to_device(step, "cuda"), case.window)
    torch.testing.assert_close(found.cpu(), expected, rtol=0.0, atol=4e-3)


def make_spec(**overrides: object) -> AttentionSpec:
    values = {"num_heads": 9, "num_kv_heads": 3, "head_size": 64, "block_size": 16, "cache_dtype": torch.float16}
    return AttentionSpec(**{"device": "cpu", **values, **overrides})


def test_backend_asked_for_in_vain_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="flash can't be used: flash-attn computes on CUDA"):
        choose_backend(make_spec(), "flash")
    with pytest.raises(ValueError, match="backend warp is unknown: choose from auto, reference"):
        choose_backend(make_spec(), "warp")


def test_without_the_compiled_kernel_torch_takes_over_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedtop.kernels.cpu.load_library", lambda: (None, "built without a C++ compiler"))
    backend, reason = choose_backend(make_spec())
    assert backend.name == "sdpa" and "cpu is out: built without a C++ compiler" in reason


def test_flash_names_the_block_size_rule_where_small_blocks_have_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedtop.kernels.flash.flash_version", lambda: (2, 8, 3))
    monkeypatch.setattr("schedtop.kernels.triton_decode.find_spec", lambda _: None)
    reason = FlashAttention().refuses(make_spec(device="cuda"))
    assert reason is not None and "--block-size 256" in reason and "not 16" in reason
    assert FlashAttention().refuses(make_spec(device="cuda", block_size=256)) is None
    assert "fp16 and bf16" in str(FlashAttention().refuses(make_spec(device="cuda", cache_dtype=torch.float32)))


@needs_kernel
def test_compiled_kernel_brings_no_openmp_runtime_of_its_own() -> None:
    """Two in one process would fight for the cores. Looked at in a process that has loaded nothing else."""
    code = (
        "from schedtop.kernels.cpu import load_library; load_library()\n"
        "import json, threadpoolctl; print(json.dumps(threadpoolctl.threadpool_info()))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    runtimes = [pool["filepath"] for pool in json.loads(done.stdout) if pool["user_api"] == "openmp"]
    assert len(runtimes) == 1 and "torch" in runtimes[0]
