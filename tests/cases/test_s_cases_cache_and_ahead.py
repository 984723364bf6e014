"""Operator cases, tested at the scheduler: prefix cache, async scheduling, drafts, connectors."""

from typing import Any

import pytest
from factories import Engine, make_request, oracle, prompt
from scripted import ScriptedConnector

from schedtop.engine.encoder.cache import MediaItem
from schedtop.engine.runner.fake import FakeRunner
from schedtop.engine.snapshot import Viewport


@pytest.mark.parametrize(("length", "hit"), [(32, 16), (33, 32), (16, 0)])
@pytest.mark.parametrize("is_async", [False, True])
def test_a51_everything_cached_zero_new_tokens(length: int, hit: int, is_async: bool) -> None:
    engine = Engine(prefix_caching=True, async_scheduling=is_async)
    for name in ("first", "second"):
        engine.add(name, length, 1, seed=1)
        engine.run()
    assert engine.taken.tokens["first"] == engine.taken.tokens["second"] == oracle(prompt(length, 1), 1)
    assert engine.total_planned("second") == length - hit
    assert engine.taken.ends["second"].num_cached_tokens == hit


@pytest.mark.parametrize("length", [32, 33, 16])
def test_a51_a_connector_that_claims_all_leaves_a_token_to_compute(length: int) -> None:
    runner = FakeRunner()
    engine = Engine(runner)
    connector = ScriptedConnector(engine.core, runner)
    connector.num_loadable = 32
    engine.add("r", length, 1, seed=1)
    engine.step()
    if connector.loading:
        connector.end("r")
    engine.run()
    assert engine.total_planned("r") >= 1
    assert engine.taken.ends["r"].num_cached_tokens == (length - 1) // 16 * 16
    assert engine.taken.tokens["r"] == oracle(prompt(length, 1), 1)


def test_a52_the_plan_is_made_before_the_hit_is_known() -> None:
    engine = Engine(usable=20, block_size=256, prefix_caching=True)
    engine.add("prefix", 257, 1, seed=1)
    engine.run()
    engine.add("r", 465, 1, seed=1)
    engine.step()
    assert engine.plans[-1].num_scheduled_tokens == {"r": 209}
    assert engine.plans[-1].output.scheduled_new_reqs[0].num_computed_tokens == 256
    assert engine.run().tokens["r"] == oracle(prompt(465, 1), 1)


IMAGE = MediaItem("image", 0, 20)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"adapter": "x"}, {"cache_salt": "x"}),
        ({"cache_salt": "ab", "adapter": "c"}, {"cache_salt": "a", "adapter": "bc"}),
        ({"cache_salt": "abc"}, {"cache_salt": "ab", "adapter": "c"}),
        ({"media": (IMAGE,), "cache_salt": "s"}, {"media": (IMAGE,), "cache_salt": "t"}),
        ({"media": (IMAGE,)}, {"media": (MediaItem("other image", 0, 20),)}),
        ({"media": (IMAGE,)}, {}),
        ({"media": (IMAGE,)}, {"cache_salt": "image"}),
    ],
)
def test_a53_salt_and_adapter_name_share_one_namespace(one: dict[str, Any], other: dict[str, Any]) -> None:
    engine = Engine(prefix_caching=True, max_adapters=2, encoder_cache_size=64, max_num_encoder_tokens=64)
    for name, fields in (("one", one), ("other", other), ("again", one)):
        engine.add(name, 64, 1, seed=1, **fields)
        engine.run()
    hits = {name: end.num_cached_tokens for name, end in engine.taken.ends.items()}
    assert hits == {"one": 0, "other": 0, "again": 48}


@pytest.mark.parametrize("defers", [False, True])
def test_a55_wrong_end_of_the_chain_is_evicted(defers: bool) -> None:
    engine = Engine(usable=3, prefix_caching=True, defers_block_free=defers, async_scheduling=defers)
    for run in range(200):
        engine.add(f"a{run}", 48, 1, seed=1)
        engine.run()
        if run:
            assert engine.taken.ends[f"a{run}"].num_cached_tokens == 32
        engine.add(f"b{run}", 16, 1, seed=2 + run)
        engine.run()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("times", [1, 2])
def test_a57_token_lost_after_pause_clear_resume(depth: int, times: int) -> None:
    for after in (7, 8):
        engine = Engine(prefix_caching=True, async_scheduling=True, async_depth=depth)
        engine.add("r", 16, 20)
        while len(engine.taken.tokens.get("r", [])) < after:
            engine.step()
        for _ in range(times):
            engine.core.pause("keep")
            assert engine.core.reset_prefix_cache(preempt_running=True)
            engine.core.resume()
        assert engine.run().tokens["r"] == oracle(make_request("r", 16).token_ids, 20)


def test_a59_old_lookup_used_at_a_late_admission() -> None:
    engine = Engine(usable=8, prefix_caching=True)
    engine.add("seed", 49, 1, seed=1)
    engine.run()
    engine.add("runner", 66, 60, seed=2)
    engine.step()
    engine.add("w", 64, 2, seed=1)
    engine.step()
    waiting = engine.sched.requests["w"]
    assert len(engine.sched.kv.find_prefix(waiting)) == 3
    engine.steps(10)
    assert engine.sched.num_waiting == 1
    taken = engine.run()
    assert taken.ends["w"].num_cached_tokens == 0
    assert taken.tokens["w"] == oracle(prompt(64, 1), 2)


def test_a60_one_step_too_many_after_max_tokens() -> None:
    tokens = make_request("r", 10).token_ids
    by_length = Engine(async_scheduling=True)
    by_length.add("r", tokens, 4)
    by_length.run()
    assert by_length.total_planned("r") == 13
    single = Engine(async_scheduling=True)
    single.add("r", tokens, 1)
    single.run()
    assert single.total_planned("r") == 10
    assert by_length.sched.stats.wasted_tokens == single.sched.stats.wasted_tokens == 0
    by_eos = Engine(async_scheduling=True, eos=[oracle(tokens, 4)[-1]])
    by_eos.add("r", tokens, 40)
    assert by_eos.run().tokens["r"] == oracle(tokens, 4)
    assert by_eos.total_planned("r") == 14
    assert by_eos.sched.stats.wasted_tokens == 1


class ForgetfulRunner(FakeRunner):
    """Samples nothing for a row in one step, and stands where it stood before."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.forgetful_step = step

    def execute_model(self, scheduler_output):
        before = {name: (request.num_computed, len(request.token_ids)) for name, request in self.requests.items()}
        result = super().execute_model(scheduler_output)
        if scheduler_output.step == self.forgetful_step:
            result.sampled_token_ids[0] = []
            result.draft_token_ids = {}
            request = self.requests["r"]
            request.num_computed, num_tokens = before["r"]
            del request.token_ids[num_tokens:]
        return result


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_a63_all_drafts_rejected_nothing_sampled(num_drafts: int) -> None:
    runner = ForgetfulRunner(6)
    runner.proposer = (lambda tokens: [*oracle(tokens, 1), 5, 5][:num_drafts]) if num_drafts else None
    engine = Engine(runner, max_num_speculative_tokens=num_drafts)
    engine.add("r", 10, 20)
    for _ in range(60):
        engine.step()
        for request in engine.sched.running:
            assert request.num_computed_tokens < request.num_tokens, "running, but nothing to schedule"
    assert engine.taken.tokens["r"] == oracle(make_request("r", 10).token_ids, 20)


def test_a65_placeholder_count_below_zero_with_no_preemption() -> None:
    answers = []
    for is_async in (False, True):
        engine = Engine(max_num_batched_tokens=64, async_scheduling=is_async)
        engine.add("r0", 200, 8)
        for index in range(1, 4):
            engine.at(index, lambda index=index, engine=engine: engine.add(f"r{index}", 200, 8))
        while engine.core.has_work:
            engine.step()
            assert all(request.num_output_placeholders >= 0 for request in engine.sched.requests.values())
        answers.append(engine.taken.tokens)
    assert answers[0] == answers[1]
    assert answers[0]["r3"] == oracle(make_request("r3", 200).token_ids, 8)


@pytest.mark.parametrize("is_async", [False, True])
def test_a69_failed_kv_load_recovered_with_wrong_text(is_async: bool) -> None:
    runner = FakeRunner()
    engine = Engine(runner, prefix_caching=True, async_scheduling=is_async)
    connector = ScriptedConnector(engine.core, runner)
    connector.num_loadable = 32
    engine.add("one", 48, 5, seed=1)
    engine.add("two", 48, 5, seed=1)
    engine.step()
    assert sorted(connector.loading) == ["one", "two"]
    for name in ("one", "two"):
        connector.end(name, is_ok=False)
    assert engine.sched.kv.usage().cached == 0
    taken = engine.run()
    expected = oracle(prompt(48, 1), 5)
    assert taken.tokens == {"one": expected, "two": expected}
    connector.num_loadable = 0
    engine.add("three", 48, 5, seed=1)
    assert engine.run().tokens["three"] == expected


def test_a71_at_idle_every_block_is_free_or_cached() -> None:
    engine = Engine(prefix_caching=True)
    for index in range(5):
        engine.add(f"r{index}", 60, 4)
    engine.run()
    pool = engine.core.snapshot(Viewport()).pool
    assert (pool.free, pool.cached) == (1000, 15)
