"""Drafts from n-gram lookup: found where they should be, and never a change to the output."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.knobs import initial_knobs
from schedtop.engine.runner.fake import FakeRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.snapshot import Viewport
from schedtop.engine.spec.ngram import propose_ngram


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9]),
        ([1, 2, 3, 1, 2, 4, 9, 1, 2], [4, 9, 1]),  # the latest occurrence counts
        ([5, 1, 2, 7, 0, 1, 2, 8, 5, 1, 2], [7, 0, 1]),  # a longer suffix before a later occurrence
        ([1, 1, 1], [1]),  # the occurrence may overlap the suffix
        ([1, 2, 3], []),
        ([1], []),
        ([], []),
        ([256, 1, 65536, 256], []),  # equal bytes, not equal tokens
    ],
)
def test_drafts_are_what_followed_the_same_tokens_last_time(tokens: list[int], drafts: list[int]) -> None:
    assert propose_ngram(tokens, 3) == drafts


def by_the_book(tokens: Sequence[int], num_drafts: int) -> list[int]:
    for n in (4, 3, 2):
        for start in range(len(tokens) - n - 1, -1, -1):
            if list(tokens[start : start + n]) == list(tokens[-n:]):
                return list(tokens[start + n : start + n + num_drafts])
    return []


@given(st.lists(st.sampled_from([0, 1, 256, 65536]), max_size=40), st.integers(1, 5))
def test_the_search_over_bytes_finds_what_a_search_over_tokens_finds(tokens: list[int], num_drafts: int) -> None:
    assert propose_ngram(tokens, num_drafts) == by_the_book(tokens, num_drafts)


def test_only_the_window_is_searched() -> None:
    tokens = [7, 8, 9, *range(100, 200), 7, 8]
    assert propose_ngram(tokens, 1) == [9]
    assert propose_ngram(tokens, 1, window=50) == []


def run(
    num_drafts: int, *, is_async: bool = False, num_blocks: int = 101, period: int = 5
) -> tuple[list[int], int, int]:
    """Output of a request whose tokens repeat, the steps it took, and the drafts accepted."""
    config = EngineConfig(num_kv_blocks=num_blocks, max_num_speculative_tokens=num_drafts, max_num_seqs=8)
    runner = FakeRunner(
        next_token=lambda tokens: 500 + len(tokens) % period,
        proposer=lambda tokens: propose_ngram(tokens, num_drafts),
    )
    core = EngineCore(config, runner, initial_knobs(config, async_scheduling=is_async), clock=lambda: 0.0)
    core.add_request("r", list(range(20)), SamplingParams(max_tokens=40))
    output: list[int] = []
    while core.has_work:
        done = core.step()
        assert core.self_check() == []
        for item in done.outputs if done else ():
            output += item.new_token_ids
    return output, runner.num_steps, core.snapshot(Viewport()).counters.accepted_tokens


@pytest.mark.parametrize("is_async", [False, True])
def test_drafts_save_steps_and_change_no_token(is_async: bool) -> None:
    plain, num_plain_steps, _ = run(0)
    drafted, num_steps, num_accepted = run(3, is_async=is_async)
    assert drafted == plain and len(plain) == 40
    assert num_steps < num_plain_steps
    assert num_accepted > 20


@pytest.mark.parametrize("is_async", [False, True])
def test_wrong_drafts_change_no_token_either(is_async: bool) -> None:
    config = EngineConfig(num_kv_blocks=101, max_num_speculative_tokens=2, max_num_seqs=8)
    outputs = []
    for proposer in (None, lambda tokens: [tokens[-1] + 1, 3]):
        runner = FakeRunner(proposer=proposer)
        core = EngineCore(config, runner, initial_knobs(config, async_scheduling=is_async), clock=lambda: 0.0)
        core.add_request("r", list(range(20)), SamplingParams(max_tokens=20))
        tokens: list[int] = []
        while core.has_work:
            done = core.step()
            for item in done.outputs if done else ():
                tokens += item.new_token_ids
        outputs.append(tokens)
    assert outputs[0] == outputs[1] and len(outputs[0]) == 20
