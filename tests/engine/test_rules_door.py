"""Impossible requests, bounded queues, and answers that outgrow the pool: each with its limit in tokens."""

import pytest
from factories import Engine

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.errors import ConfigError, QueueFull, RequestRefused
from schedtop.engine.runner.fake import FakeRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.snapshot import FinishReason


def test_a_prompt_longer_than_the_models_length_less_one_is_refused_naming_the_limit() -> None:
    engine = Engine(max_model_len=128)
    engine.add("fits", 127, 2)
    with pytest.raises(RequestRefused, match=r"128 tokens, the limit is 127 .*max_model_len 128"):
        engine.add("long", 128, 1)


def test_a_prompt_longer_than_the_usable_pool_is_refused_naming_the_limit() -> None:
    engine = Engine(usable=4)
    engine.add("fits", 64, 1)
    with pytest.raises(RequestRefused, match=r"65 tokens, the whole KV pool holds 64 \(4 blocks of 16\)"):
        engine.add("big", 65, 1)


def test_a_refusal_leaves_no_trace_but_its_count() -> None:
    engine = Engine(usable=4)
    with pytest.raises(RequestRefused):
        engine.add("big", 65, 1)
    counters = engine.sched.stats.counters()
    assert (counters.added, counters.refused) == (0, 1)
    assert (engine.sched.num_waiting, engine.sched.requests, engine.core.has_work) == (0, {}, False)
    assert engine.core.take_outputs().events[-1].kind == "refused"


@pytest.mark.parametrize(
    ("request_id", "prompt", "sampling", "message"),
    [
        ("", [1], {}, "1 to 256 characters"),
        ("x" * 257, [1], {}, "has 257"),
        ("r", [], {}, "empty"),
        ("r", [5, -1], {}, "token id -1"),
        ("r", [5, 100], {}, "token id 100 is outside the vocabulary of 100"),
        ("r", [1], {"max_tokens": 0}, "max_tokens=0"),
        ("r", [1], {"max_tokens": 4, "min_tokens": 5}, "min_tokens=5"),
        ("r", [1], {"top_p": 0.0}, "top_p=0.0"),
    ],
)
def test_bad_input_gives_one_error_that_names_it(request_id: str, prompt: list, sampling: dict, message: str) -> None:
    engine = Engine(vocab_size=100)
    with pytest.raises(RequestRefused, match=message):
        engine.core.add_request(request_id, prompt, SamplingParams(**sampling))


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = Engine()
    engine.add("r", 10, 1)
    with pytest.raises(RequestRefused, match="'r' is in use"):
        engine.add("r", 10, 1)
    engine.run()
    engine.add("r", 10, 1)


def test_an_adapter_is_refused_where_there_are_no_slots() -> None:
    with pytest.raises(RequestRefused, match="without adapter slots"):
        Engine().add("r", 10, adapter="x")


def test_max_num_queued_reqs_bounds_the_queue() -> None:
    engine = Engine(max_num_queued_reqs=2)
    engine.add("a", 10)
    engine.add("b", 10)
    with pytest.raises(QueueFull, match="2 requests wait, the limit max_num_queued_reqs is 2"):
        engine.add("c", 10)
    engine.step()
    engine.add("c", 10)


def test_max_num_queued_tokens_bounds_the_queue() -> None:
    engine = Engine(max_num_queued_tokens=25)
    engine.add("a", 10)
    engine.add("b", 15)
    with pytest.raises(QueueFull, match="25 tokens wait and this prompt has 1, the limit max_num_queued_tokens is 25"):
        engine.add("c", 1)


def test_an_answer_that_outgrows_the_whole_pool_ends_with_a_capacity_reason() -> None:
    engine = Engine(usable=4)
    engine.add("r", 60, 50)
    engine.run()
    end = engine.taken.ends["r"]
    assert end.finish_reason is FinishReason.CAPACITY
    assert "needs 5 KV blocks and the whole pool has 4 (64 tokens)" in end.detail
    assert len(engine.taken.tokens["r"]) == 5  # the 65th token is sampled from the 64 that fit
    assert engine.num_free == 4
    assert engine.sched.stats.preemptions == 0


def test_an_answer_that_outgrows_the_pool_throws_nobody_out_on_its_way() -> None:
    engine = Engine(usable=4, policy="priority")
    engine.add("r", 60, 50, priority=0)
    engine.steps(4)
    engine.core.set_knobs({"watermark": 0.0})
    engine.add("tiny", 1, 3, priority=5)
    engine.run()
    assert engine.reasons() == {"r": "capacity", "tiny": "length"}
    assert engine.sched.stats.preemptions == 0


def test_drafts_never_make_a_request_outgrow_the_pool() -> None:
    for is_async in (False, True):
        engine = Engine(usable=4, max_num_speculative_tokens=4, async_scheduling=is_async)
        engine.runner.proposer = lambda tokens: [1, 2, 3, 4]
        engine.add("r", 50, 15)  # its last token is the 65th: 64 are computed
        engine.run()
        assert engine.reasons() == {"r": "length"}
        assert len(engine.taken.tokens["r"]) == 15


def test_an_outgrown_request_waits_where_vllm_waits() -> None:
    engine = Engine(usable=4, ends_outgrown=False)
    engine.add("r", 60, 50)
    for _ in range(30):
        engine.step()
    assert not engine.core.has_work  # it waits without spinning
    assert engine.sched.stats.preemptions == 1


def test_sizes_that_do_not_fit_together_are_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs=65 exceeds max_num_batched_tokens=64"):
        EngineConfig(max_num_seqs=65, max_num_batched_tokens=64)


def test_a_live_budget_below_the_number_running_is_accepted_with_a_warning() -> None:
    engine = Engine()
    for name in "abc":
        engine.add(name, 4, 50)
    engine.step()
    change = engine.core.set_knobs({"max_num_batched_tokens": 2})
    assert "below the 3 running requests" in change.warnings[0]
    engine.step()
    assert len(engine.plans[-1].num_scheduled_tokens) == 2


def test_an_answer_that_has_outgrown_the_pool_while_it_waits_ends_too_and_holds_up_nobody() -> None:
    engine = Engine(usable=4)
    engine.add("r", 60, 50)
    engine.steps(5)
    assert engine.sched.requests["r"].num_tokens == 65
    engine.core.preempt(["r"])
    engine.add("next", 20, 3)
    engine.run()
    assert engine.reasons() == {"r": "capacity", "next": "length"}


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(logit_bias={9_999_999: 5.0}),
        SamplingParams(logit_bias={-3: 5.0}),
        SamplingParams(stop_token_ids=(99_999_999,), min_tokens=2),
        SamplingParams(stop_token_ids=(-99,)),
        SamplingParams(bad_words_ids=((1, 5_000),)),
    ],
)
def test_a_token_the_model_does_not_have_is_refused_wherever_it_stands(sampling: SamplingParams) -> None:
    core = EngineCore(EngineConfig(), FakeRunner(), vocab_size=1000)
    with pytest.raises(RequestRefused, match="token id"):
        core.add_request("r1", [1, 2, 3], sampling)
    assert not core.scheduler.requests


def test_a_block_limit_that_strands_requests_says_so_before_and_after() -> None:
    core = EngineCore(EngineConfig(), FakeRunner())
    core.add_request("big", list(range(400)), SamplingParams(max_tokens=4))
    core.add_request("small", list(range(20)), SamplingParams(max_tokens=4))
    for is_dry_run in (True, False):
        change = core.set_knobs({"kv_block_limit": 10}, dry_run=is_dry_run)
        assert change.warnings == ["1 requests need more than kv_block_limit=10 blocks: they wait until it is raised"]
    assert not core.set_knobs({"kv_block_limit": 30}).warnings


def test_a_budget_that_unsplittable_prompts_exceed_is_warned_of() -> None:
    core = EngineCore(EngineConfig(), FakeRunner())
    core.add_request("long", list(range(400)), SamplingParams(max_tokens=4))
    change = core.set_knobs({"enable_chunked_prefill": False, "max_num_batched_tokens": 100})
    assert len(change.warnings) == 1
    assert "max_num_batched_tokens=100" in change.warnings[0]
