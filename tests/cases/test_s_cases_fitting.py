"""Operator cases, tested at the scheduler: requests that can't fit, preemption, head-of-line blocking, priority."""

import random
from collections import Counter
from itertools import pairwise

import pytest
from factories import Engine, make_request, oracle
from scripted import ScriptedConnector

from schedtop.engine.encoder.cache import MediaItem
from schedtop.engine.errors import RequestRefused
from schedtop.engine.runner.fake import FakeRunner
from schedtop.engine.sched.explain import wait_reason
from schedtop.engine.snapshot import FinishReason, PauseState, Viewport, WaitReason


def prompt_of(engine: Engine, request_id: str) -> list[int]:
    request = engine.sched.requests[request_id]
    return request.token_ids[: request.num_prompt_tokens]


@pytest.mark.parametrize("budget", [2048, 256])
def test_a1_prompt_bigger_than_the_whole_pool_hangs_the_server_and_everyone_behind_it(budget: int) -> None:
    engine = Engine(usable=49, max_model_len=2048, max_num_batched_tokens=budget)
    with pytest.raises(RequestRefused, match="1002 tokens, the whole KV pool holds 784"):
        engine.add("r1", 1002, 50)
    engine.add("r2", 8, 4)
    engine.run()
    assert len(engine.plans) - 1 == 4  # and one that only tells the runner of the end
    assert all("r1" not in plan.num_scheduled_tokens for plan in engine.plans)
    snapshot = engine.core.snapshot(Viewport())
    assert (snapshot.num_running, snapshot.num_waiting, snapshot.pool.in_use) == (0, 0, 0)


def test_a3_off_by_one_one_block_of_the_pool_is_reserved() -> None:
    engine = Engine(num_kv_blocks=5)
    assert engine.core.snapshot(Viewport()).pool.usable == 4
    engine.add("fits", 64, 1)
    engine.run()
    engine.add("outgrows", 64, 2)
    engine.run()
    with pytest.raises(RequestRefused, match=r"65 tokens, the whole KV pool holds 64 \(4 blocks of 16\)"):
        engine.add("big", 65, 1)
    assert engine.reasons() == {"fits": "length", "outgrows": "capacity"}
    assert "the whole pool has 4 (64 tokens)" in engine.taken.ends["outgrows"].detail


@pytest.mark.parametrize("is_async", [False, True])
def test_a5_high_priority_head_that_does_not_fit_strands_a_finished_load(is_async: bool) -> None:
    runner = FakeRunner()
    engine = Engine(runner, usable=8, policy="priority", async_scheduling=is_async)
    connector = ScriptedConnector(engine.core, runner)
    connector.num_loadable = 64
    engine.add("low", 70, 3, priority=5)
    engine.step()
    assert engine.sched.kv.usage().held == 4
    connector.num_loadable = 0
    engine.add("high", 96, 3, priority=0)
    engine.steps(3)
    assert not engine.taken.tokens
    connector.end("low")
    taken = engine.run()
    assert list(taken.ends) == ["low", "high"]
    assert engine.reasons() == {"low": "length", "high": "length"}


def test_a7_waiting_requests_fill_the_encoder_cache() -> None:
    engine = Engine(usable=6, encoder_cache_size=100, max_num_encoder_tokens=100)
    for index in range(3):
        engine.add(f"r{index}", 80, 4, media=(MediaItem(f"image {index}", 10, 60),))
    encoder = engine.sched.encoder
    while engine.core.has_work:
        engine.step()
        assert encoder.cache.num_used + encoder.cache.num_free == 100
        readers = set().union(*(entry.readers for entry in encoder.cache._entries.values()))
        assert readers <= {request.request_id for request in engine.sched.running}
    assert set(engine.reasons().values()) == {"length"}
    assert len(engine.taken.ends) == 3


def test_a11_a_long_prompt_is_resumed_and_thrown_out_again_and_again() -> None:
    engine = Engine(usable=20, max_num_batched_tokens=64)
    engine.at(0, lambda: engine.add("r1", 160, 160))
    engine.at(1, lambda: engine.add("r2", 256, 8))
    engine.add("start", 1, 1)
    taken = engine.run()
    assert engine.sched.stats.preemptions == 0
    assert engine.total_planned("r2") == 256 + 7
    assert taken.end_step["r2"] - taken.end_step["r1"] == 4 + 7


def test_a13_preempted_request_loses_its_place_to_one_that_never_started() -> None:
    """Ours: under priority the place is (priority, arrival, id), so the older one that never ran goes first."""
    engine = Engine(usable=8, policy="priority")
    engine.add("b", 100, 5, arrived=0.0)
    engine.core.hold(["b"])
    engine.add("a", 60, 60, arrived=1.0)
    engine.steps(3)
    engine.core.release(["b"])
    engine.step()
    assert [request.request_id for request in engine.sched.running] == ["a"]
    engine.core.preempt(["a"])
    engine.step()
    assert [request.request_id for request in engine.sched.running] == ["b"]
    taken = engine.run()
    assert list(taken.ends) == ["b", "a"]


def test_a13_preempted_under_fcfs_keeps_its_place_before_one_that_never_started() -> None:
    engine = Engine(usable=8)
    engine.add("a", 60, 60)
    engine.steps(3)
    engine.add("b", 100, 5)
    engine.core.preempt(["a"])
    engine.step()
    assert [request.request_id for request in engine.sched.running] == ["a"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a13_preemptions_per_request_stay_within_the_cap(policy: str) -> None:
    total = 0
    for mix in range(60):
        draw = random.Random(mix)
        engine = Engine(
            usable=draw.randint(8, 14),
            max_num_batched_tokens=draw.choice([32, 256]),
            max_num_seqs=8,
            policy=policy,
            victim=draw.choice(["newest", "least_computed", "most_blocks"]),
            max_preemptions=2,
            async_scheduling=draw.random() < 0.5,
        )
        worst: Counter[str] = Counter()
        for index in range(8):
            engine.add(f"r{index}", draw.randint(1, 60), draw.randint(1, 60), priority=draw.randint(0, 2))
        while engine.core.has_work:
            engine.step()
            for record in engine.sched.stats.recent_preemptions:
                worst[record.victim] = max(worst[record.victim], record.num_preemptions)
        assert len(engine.taken.ends) == 8
        assert max(worst.values(), default=0) <= 2
        total += worst.total()
    assert total > 60  # the mixes do press on the pool


def test_a15_output_after_preemption_is_not_the_same() -> None:
    answers = []
    for usable in (6, 20):
        for budget in (16, 2048):
            for is_async in (False, True):
                engine = Engine(usable=usable, max_num_batched_tokens=budget, async_scheduling=is_async)
                engine.add("a", 32, 40)
                engine.add("b", 32, 40)
                expected = {name: oracle(prompt_of(engine, name), 40) for name in ("a", "b")}
                answers.append(engine.run().tokens)
                assert (engine.sched.stats.preemptions > 0) is (usable == 6)
                if usable == 6 and budget == 2048 and not is_async:
                    assert (engine.sched.stats.preemptions, engine.sched.stats.lost_tokens) == (1, 48)
    assert all(answer == expected for answer in answers)
    assert len(answers) == 8


def test_a17_freed_block_is_reused_while_an_old_step_still_writes_it() -> None:
    tokens = make_request("r", 60).token_ids
    expected = oracle(tokens, 3)
    runner = FakeRunner()
    engine = Engine(runner, usable=4, async_scheduling=True, eos=[expected[2]])
    connector = ScriptedConnector(engine.core, runner)
    engine.add("r", tokens, 50)
    while "r" in engine.sched.requests:
        engine.step()
    in_flight = engine.sched.in_flight[-1]
    assert "r" in in_flight.num_scheduled_tokens  # sent before the end was found
    usage = engine.sched.kv.usage()
    assert (usage.pending, usage.free) == (4, 0)
    connector.num_loadable = 48
    engine.add("q", 64, 1)
    while in_flight in engine.sched.in_flight:
        assert not connector.loading
        engine.step()
    engine.step()
    assert connector.loading
    connector.end("q")
    assert engine.run().tokens == {"r": expected, "q": oracle(make_request("q", 64).token_ids, 1)}


def test_a20_worst_case_reservation_lets_one_big_max_tokens_block_the_rest() -> None:
    def load(engine: Engine) -> Engine:
        engine.add("r1", 16, 1000)
        for index in range(8):
            engine.add(f"s{index}", 16, 8)
        return engine

    reserve = load(Engine(usable=64, reserve_output=True))
    reserve.step()
    assert list(reserve.plans[0].num_scheduled_tokens) == ["r1"]
    on_demand = load(Engine(usable=64))
    on_demand.step()
    assert len(on_demand.plans[0].num_scheduled_tokens) == 9
    reserve.core.set_knobs({"reserve_output": False})  # affects new admissions only
    reserve.step()
    assert len(reserve.plans[1].num_scheduled_tokens) == 9
    on_demand.core.set_knobs({"reserve_output": True})
    on_demand.add("late", 16, 8)
    on_demand.step()
    assert len(on_demand.plans[1].num_scheduled_tokens) == 9  # nobody running is touched, nobody new is admitted
    assert on_demand.sched.num_waiting == 1


def test_a21_pausing_the_same_request_twice_crashes() -> None:
    engine = Engine(usable=4)
    engine.add("r1", 20, 30)
    engine.steps(2)
    assert [list(engine.core.hold(["r1"]).found.values()) for _ in range(3)] == [
        ["running"],
        ["preempted"],
        ["preempted"],
    ]
    assert [engine.core.release(["r1"]).changed for _ in range(2)] == [["r1"], []]
    engine.step()
    engine.add("r0", 30, 30)
    engine.core.preempt(["r1"])
    assert engine.core.hold(["r1"]).found == {"r1": "preempted"}
    assert engine.core.self_check() == []
    engine.run()
    assert engine.reasons() == {"r0": "length"}
    engine.core.release(["r1"])
    assert engine.run().tokens["r1"] == oracle(make_request("r1", 20).token_ids, 30)


@pytest.mark.parametrize(("admission", "start"), [("strict", 64), ("skip", 2)])
def test_a22_a_blocked_big_request_stops_small_ones_that_would_fit(admission: str, start: int) -> None:
    engine = Engine(usable=40, max_num_batched_tokens=1024, max_num_seqs=16, admission=admission)
    engine.add("r0", 256, 64)
    engine.at(1, lambda: engine.add("b", 512, 8))
    engine.at(2, lambda: [engine.add(f"c{index}", 32, 8) for index in range(8)])
    engine.steps(3)
    blocked = engine.sched.requests["b"]
    assert wait_reason(engine.sched, blocked) == (
        WaitReason.KV_BLOCKS,
        f"needs 32 blocks, {23 if admission == 'strict' else 7 + 16} free",
    )
    engine.run()
    assert engine.first_planned("c0") == start
    assert engine.first_planned("b") == 64


@pytest.mark.parametrize(("threshold", "short", "long"), [(0, 16, 15), (32, 1, 17)])
def test_a24_one_long_prompt_takes_the_whole_step_budget(threshold: int, short: int, long: int) -> None:
    engine = Engine(max_num_batched_tokens=64, long_prefill_token_threshold=threshold)
    engine.add("l", 1024, 4)
    engine.at(1, lambda: engine.add("s", 16, 4))
    taken = engine.run()
    assert (taken.first_step["s"], taken.first_step["l"]) == (short, long)


def test_a24_a_live_threshold_lets_the_short_one_start_at_once() -> None:
    engine = Engine(max_num_batched_tokens=64)
    engine.add("l", 1024, 4)
    engine.at(1, lambda: engine.add("s", 16, 4))
    engine.at(5, lambda: engine.core.set_knobs({"long_prefill_token_threshold": 32}))
    assert engine.run().first_step["s"] == 5


class TimedRunner(FakeRunner):
    """Takes 2 ms and 0.4 ms per token."""

    engine: Engine

    def execute_model(self, scheduler_output):
        self.engine.clock.now += 0.002 + 0.0004 * scheduler_output.total_num_scheduled_tokens - 1.0
        return super().execute_model(scheduler_output)


def gaps_ms(budget: int, change: dict[str, int] | None = None) -> list[float]:
    runner = TimedRunner()
    engine = runner.engine = Engine(runner, max_model_len=16384, max_num_batched_tokens=budget)
    engine.add("d", 16, 400)
    engine.at(20, lambda: engine.add("l", 8192, 2))
    if change:
        engine.at(22, lambda: engine.core.set_knobs(change))
    times = []
    while engine.core.has_work:
        engine.step()
        if any(output.request_id == "d" and output.new_token_ids for output in engine.taken.steps[-1].outputs):
            times.append(engine.clock.now)
    return [1e3 * (later - earlier) for earlier, later in pairwise(times)]


@pytest.mark.parametrize("budget", [8192, 1024, 256])
def test_a26_running_streams_crawl_during_a_long_prefill(budget: int) -> None:
    assert max(gaps_ms(budget)) == pytest.approx(2 + 0.4 * budget)


def test_a26_a_live_budget_takes_effect_at_the_next_step() -> None:
    gaps = gaps_ms(1024, {"max_num_batched_tokens": 256})
    assert [gap for gap in gaps if gap > 50] == pytest.approx([2 + 0.4 * 1024] * 2 + [2 + 0.4 * 256] * 24)


def test_a28_adapter_limit_starves_an_adapter() -> None:
    engine = Engine(max_adapters=1, max_bypass=5)
    engine.add("a0", 16, 4, adapter="a")
    engine.add("b", 16, 4, adapter="b")
    for step in range(1, 60):
        engine.at(step, lambda step=step: engine.add(f"a{step}", 16, 4, adapter="a"))
    while "b" not in engine.taken.first_step:
        engine.step()
        running = {request.adapter for request in engine.sched.running}
        assert len(running) <= 1  # only requests that run count
    assert engine.taken.first_step["b"] <= 15
    engine.run()
    assert len(engine.taken.ends) == 61


def test_a30_ties_of_priority_go_by_arrival_then_id_and_lower_runs_first() -> None:
    engine = Engine(policy="priority", knobs={"max_num_seqs": 1})
    for name, priority in (("p5", 5), ("none", 0), ("big", 2**31), ("minus", -100), ("also none", 0)):
        engine.add(name, 4, 1, priority=priority)
    taken = engine.run()
    assert list(taken.ends) == ["minus", "also none", "none", "p5", "big"]


def test_a34_abort_before_any_block_exists() -> None:
    for has_connector in (False, True):
        runner = FakeRunner()
        engine = Engine(runner)
        connector = ScriptedConnector(engine.core, runner) if has_connector else None
        engine.add("r", 40, 8)
        engine.core.abort(["r"])
        engine.run()
        assert engine.reasons() == {"r": FinishReason.ABORT}
        assert engine.num_free == 1000
        if connector:
            assert connector.finished == [("r", [])]
            connector.num_loadable = 32
            engine.add("loading", 40, 8)
            engine.step()
            engine.core.abort(["loading"])
            assert engine.sched.kv.usage().held == 2
            connector.end("loading")
            engine.run()
            assert engine.num_free == 1000


def test_a79_after_the_reply_to_pause_no_new_request_is_scheduled() -> None:
    engine = Engine()
    engine.add("r", 20, 10)
    engine.steps(2)
    engine.core.pause("wait")
    for step in range(2, 12):
        engine.at(step, lambda step=step: engine.add(f"late{step}", 20, 2))
    engine.run()
    assert list(engine.taken.ends) == ["r"]
    snapshot = engine.core.snapshot(Viewport())
    assert snapshot.pause is PauseState.PAUSED_NEW
    assert snapshot.waiting_by_reason == {"paused": snapshot.num_waiting}
    assert engine.core.start_drain() == 0  # it says so at once, it doesn't hang
    engine.core.resume()
    engine.run()
    assert engine.sched.num_waiting == 0
