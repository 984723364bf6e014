"""Operator cases, tested at the scheduler: aborts, ids, counters, grammars, changes to a running engine."""

import contextlib
import itertools
import random
from typing import Any

import pytest
from factories import Engine, RecordingScheduler, make_request, oracle, split_settings
from scripted import FaultyRunner, ScriptedConnector

from schedtop.engine.core import EngineCore
from schedtop.engine.errors import KnobRefused, RequestRefused
from schedtop.engine.runner.fake import FakeRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sched import transfers
from schedtop.engine.sched.explain import waiting_by_reason
from schedtop.engine.sched.scheduler import Scheduler
from schedtop.engine.snapshot import FinishReason, LimitedBy, Viewport, WaitReason


@pytest.mark.parametrize("order", list(itertools.permutations(["finish", "abort", "abort again", "received", "sent"])))
def test_a36_abort_twice_after_the_end_of_unknown_id_with_two_transfers_pending(order: tuple[str, ...]) -> None:
    runner = FakeRunner()
    engine = Engine(runner, usable=10)
    connector = ScriptedConnector(engine.core, runner)
    connector.num_loadable, connector.keeps_blocks = 64, True
    engine.add("r", 70, 8)
    engine.step()
    assert engine.num_free == 6
    is_loading, is_live, is_kept = True, True, False
    for act in order:
        match act:
            case "finish":
                engine.core.abort(["r"], reason=FinishReason.STOP)
            case "received":
                transfers.load_finished(engine.sched, "r", True)
                is_loading = False
            case "sent":
                transfers.send_finished(engine.sched, "r")
                is_kept = False
            case _:
                engine.core.abort(["r"])
        if act in ("finish", "abort", "abort again") and is_live:
            is_live, is_kept = False, not is_loading
        assert engine.num_free == (6 if is_loading or is_live or is_kept else 10)
        assert engine.core.self_check() == []
    transfers.send_finished(engine.sched, "r")
    assert engine.num_free == 10
    assert len(connector.finished) == 1


def test_a36_an_unknown_id_is_reported_and_nothing_else_happens() -> None:
    engine = Engine()
    assert engine.core.abort(["nobody"]).unknown == ["nobody"]
    transfers.load_finished(engine.sched, "nobody", True)
    transfers.send_finished(engine.sched, "nobody")
    assert engine.core.self_check() == []


@pytest.mark.parametrize("is_async", [False, True])
def test_a40_same_request_id_twice(is_async: bool) -> None:
    engine = Engine(async_scheduling=is_async)
    engine.add("r", 20, 5)
    with pytest.raises(RequestRefused, match="in use"):
        engine.add("r", 30, 5)
    tokens = list(engine.sched.requests["r"].token_ids)
    while "r" not in engine.taken.ends:
        engine.step()
    first = engine.taken.tokens.pop("r")
    assert engine.taken.ends.pop("r").finish_reason == "length"
    other = make_request("other", 33).token_ids
    engine.add("r", other, 6)  # before any further step
    taken = engine.run()
    assert (first, taken.tokens["r"]) == (oracle(tokens, 5), oracle(other, 6))
    assert engine.core.self_check() == []


def test_a40_an_id_is_reused_while_the_aborted_one_is_in_flight() -> None:
    engine = Engine(async_scheduling=True, async_depth=3)
    engine.add("r", 20, 50)
    engine.steps(4)
    seen = len(engine.taken.tokens["r"])
    engine.core.abort(["r"])
    engine.take(engine.core.take_outputs())
    engine.taken.ends.clear()
    other = make_request("other", 33).token_ids
    engine.add("r", other, 6)
    assert engine.run().tokens["r"][seen:] == oracle(other, 6)


def test_a41_recompute_after_preemption_counted_as_cache_hits() -> None:
    engine = Engine(usable=6, prefix_caching=True)
    engine.add("a", 32, 40)
    engine.add("b", 32, 40)
    engine.run()
    counters = engine.sched.stats.counters()
    assert counters.preemptions > 0
    assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (64, 0)
    assert counters.resumed_cache_hits > 0


@pytest.mark.parametrize("is_ok", [True, False])
def test_a43_a_counter_is_asked_to_go_down_and_the_server_dies(is_ok: bool) -> None:
    runner = FakeRunner()
    engine = Engine(runner, max_model_len=4096)
    connector = ScriptedConnector(engine.core, runner)
    seen = []

    def load(num_tokens: int) -> None:
        connector.num_loadable = num_tokens
        engine.step()
        if connector.loading:  # after a failed load it isn't tried again
            connector.end("r", is_ok)
        engine.step()
        counters = engine.sched.stats.counters()
        row = engine.core.snapshot(Viewport()).running[0]
        assert counters.prompt_tokens >= counters.prefix_cache_hits >= counters.external_cache_hits >= 0
        assert row.num_prompt_tokens >= row.num_cached_tokens >= 0
        seen.append(counters)

    engine.add("r", 2048, 4)
    load(1500)
    engine.core.preempt(["r"])
    load(2000)
    assert seen[0].external_cache_hits == seen[1].external_cache_hits == (1488 if is_ok else 0)
    assert seen[1].resumed_cache_hits == (2000 if is_ok else 0)
    assert engine.run().tokens["r"] == oracle(make_request("r", 2048).token_ids, 4)


def test_a48_first_token_count_does_not_match_finished_requests() -> None:
    engine = Engine(usable=100, max_num_seqs=20)
    for index in range(20):
        engine.add(f"r{index}", 20, 10)
    engine.steps(3)
    engine.core.preempt([f"r{index}" for index in range(6)])
    engine.core.abort([f"r{index}" for index in range(6, 10)])
    engine.add("never", 20, 10)
    engine.core.abort(["never"])
    taken = engine.run()
    assert engine.sched.stats.preemptions >= 6
    emitted = [request_id for request_id, tokens in taken.tokens.items() if tokens]
    samples = sum(len(record.ttft) for record in engine.core.recent_steps(1000))
    assert engine.sched.stats.first_tokens == samples == len(emitted) == 20


def test_a49_waiting_is_one_number_for_two_causes() -> None:
    for num_more in (0, 10_000):
        engine = Engine(usable=10)
        sched = engine.sched
        for name in ("runs", "preempted", "g0", "g1", "l0", "l1"):
            engine.add(name, 30 if name != "runs" else 90, 40)
        for name, reason in (("g", WaitReason.GRAMMAR), ("l", WaitReason.KV_TRANSFER)):
            for index in range(2):
                sched.defer(sched.requests[f"{name}{index}"], reason)
        engine.steps(2)
        for index in range(3 + num_more):
            engine.add(f"w{index}", 90, 40)
        engine.core.preempt(["preempted"])
        engine.core.hold(["preempted"])
        engine.step()
        expected = {
            WaitReason.GRAMMAR: 2,
            WaitReason.KV_TRANSFER: 2,
            WaitReason.HELD: 1,
            WaitReason.KV_BLOCKS: 1,
            WaitReason.BEHIND: 2 + num_more,
        }
        reasons = waiting_by_reason(sched)
        assert reasons == {reason.value: count for reason, count in expected.items()}
        assert sum(reasons.values()) == sched.num_waiting


class SlowGrammars:
    """A grammar backend whose builds end when a test says so, or never."""

    def compile(self, schema: str) -> Any:
        raise ValueError(f"no grammar in {schema}")


def test_a66_grammar_fails_and_the_client_hears_of_it_while_others_go_on() -> None:
    config, knobs = split_settings({})
    core = EngineCore(config, FakeRunner(), knobs, grammar_backend=SlowGrammars())
    posted: list[bool] = []
    core.on_mail = lambda: posted.append(True)
    for index in range(50):
        core.add_request(f"g{index}", [1, 2, 3], SamplingParams(grammar="{}", max_tokens=3))
    core.add_request("plain", [1, 2, 3], SamplingParams(max_tokens=3))
    assert waiting_by_reason(core.scheduler)["grammar compiling"] == 50
    ends: dict[str, Any] = {}
    num_steps = 0
    while len(ends) < 51:
        taken = core.step() if core.has_work else None
        for output in taken.outputs if taken else []:
            if output.finish_reason:
                ends[output.request_id] = output
        num_steps += "plain" not in ends
    assert ends["plain"].finish_reason == "length"
    assert {ends[f"g{index}"].finish_reason for index in range(50)} == {"error"}
    assert "no grammar in {}" in ends["g0"].detail
    core.shutdown()


def test_a71_kv_slots_leak_per_request() -> None:
    draw = random.Random(71)
    runner = FaultyRunner()
    runner.proposer = lambda tokens: [*oracle(tokens, len(tokens) % 3), 1][:3]
    engine = Engine(
        runner,
        usable=40,
        max_num_batched_tokens=128,
        max_num_seqs=12,
        max_num_speculative_tokens=3,
        prefix_caching=True,
        async_scheduling=True,
        max_model_len=300,
    )
    for index in range(500):
        with contextlib.suppress(RequestRefused):
            engine.add(f"r{index}", draw.randint(1, 320), draw.randint(1, 30), seed=draw.randint(0, 5))
        live = list(engine.sched.requests)
        if draw.random() < 0.1:
            engine.core.abort([draw.choice(live)])
        if draw.random() < 0.1:
            engine.core.preempt([draw.choice(live)])
        runner.fail_next = draw.random() < 0.01
        engine.steps(draw.randint(0, 6))
    engine.run()
    usage = engine.sched.kv.usage()
    assert (usage.free, usage.in_use, usage.held, usage.pending) == (40, 0, 0, 0)
    assert all(block.ref_cnt == 0 for block in engine.sched.kv.pool.blocks)
    assert engine.core.self_check() == []
    counters = engine.sched.stats.counters()
    assert counters.added + counters.refused == 500
    assert counters.added == sum(counters.finished.values())
    assert {"length", "abort", "error"} <= set(counters.finished)
    assert counters.preemptions > 10


def test_a77_lower_the_sequence_limit_below_what_runs() -> None:
    engine = Engine(max_num_seqs=8, usable=200)
    for index in range(13):
        engine.add(f"r{index}", 4, 200 if index < 8 else 10)
    engine.steps(2)
    core, running = engine.core, engine.sched.running
    change = core.set_knobs({"max_num_seqs": 2})
    assert "8 requests are running" in change.warnings[0]
    engine.steps(5)
    assert [request.request_id for request in running] == [f"r{index}" for index in range(8)]
    core.abort([f"r{index}" for index in range(6)])
    engine.step()
    assert [request.request_id for request in running] == ["r6", "r7"]
    core.abort(["r6"])
    engine.step()
    assert [request.request_id for request in running] == ["r7", "r8"]
    core.set_knobs({"max_num_seqs": 8})
    engine.step()
    assert len(running) == 6
    for bad, message in ((9, "above its ceiling 8"), (0, "below its minimum 1"), (-1, "below its minimum 1")):
        with pytest.raises(KnobRefused, match=message):
            core.set_knobs({"max_num_seqs": bad})
    with pytest.raises(KnobRefused, match="'8' is not a whole number"):
        core.set_knobs({"max_num_seqs": "8"})
    assert engine.sched.knobs.max_num_seqs == 8


@pytest.mark.parametrize("is_async", [False, True])
def test_a81_flush_never_succeeds_because_paused_requests_sit_in_the_queue(is_async: bool) -> None:
    engine = Engine(max_num_seqs=8, prefix_caching=True, async_scheduling=is_async)
    for index in range(64):
        engine.add(f"r{index}", 40, 12)
    expected = {name: oracle(request.token_ids, 12) for name, request in engine.sched.requests.items()}
    engine.steps(20)
    engine.core.pause("keep")
    assert engine.core.reset_prefix_cache() is False
    assert engine.core.reset_prefix_cache(preempt_running=True) is True
    usage = engine.sched.kv.usage()
    assert (usage.in_use, usage.cached) == (0, 0)
    engine.core.resume()
    assert engine.run().tokens == expected


def test_a83_lowering_the_queue_limit_drops_nobody_and_refusals_are_counted() -> None:
    engine = Engine(max_num_queued_reqs=3, knobs={"max_num_seqs": 1})
    engine.add("running", 4, 50)
    engine.step()
    refused = 0
    for index in range(10):
        try:
            engine.add(f"r{index}", 4, 2)
        except RequestRefused:
            refused += 1
    assert (engine.sched.num_waiting, refused, engine.sched.stats.refused) == (3, 7, 7)
    engine.core.set_knobs({"max_num_queued_reqs": 1})
    assert engine.sched.num_waiting == 3
    with pytest.raises(RequestRefused, match="3 requests wait, the limit max_num_queued_reqs is 1"):
        engine.add("more", 4, 2)
    engine.core.set_knobs({"max_num_queued_reqs": 0})
    engine.add("more", 4, 2)
    assert len(engine.run().ends) == 5


def test_a86_compute_limits_changed_live_without_room_for_them() -> None:
    engine = Engine(max_num_batched_tokens=128, max_num_seqs=8, knobs={"max_num_batched_tokens": 64})
    envelope = {spec.name: spec.high for spec in engine.core.knob_table}
    assert (envelope["max_num_batched_tokens"], envelope["max_num_seqs"]) == (128, 8)
    for name, ceiling in (("max_num_batched_tokens", 128), ("max_num_seqs", 8)):
        for value in (ceiling + 1, 10**9):
            with pytest.raises(KnobRefused, match=f"{name}={value} is above its ceiling {ceiling}"):
                engine.core.set_knobs({name: value})
    engine.add("r", 500, 2)
    engine.step()
    engine.core.set_knobs({"max_num_batched_tokens": 128})
    assert engine.plans[0].num_scheduled_tokens == {"r": 64}
    engine.step()
    assert engine.plans[1].num_scheduled_tokens == {"r": 128}


@pytest.mark.parametrize(
    ("num_seqs", "budget", "count", "cause"),
    [
        (2, 2048, 400, LimitedBy.SEQUENCES),
        (24, 2048, 400, LimitedBy.SEQUENCES),
        (256, 2048, 400, LimitedBy.BLOCKS),
        (256, 16, 400, LimitedBy.BUDGET),
        (256, 2048, 20, LimitedBy.COMPUTE),
    ],
)
def test_a87_client_sends_far_more_at_once_than_the_pool_can_run(
    num_seqs: int, budget: int, count: int, cause: LimitedBy
) -> None:
    engine = Engine(
        usable=200,
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        knobs={"max_num_seqs": num_seqs, "max_num_batched_tokens": budget},
    )
    for index in range(count):
        engine.add(f"r{index}", 64, 64)
    engine.steps(60)
    causes = [record.limited_by for record in engine.core.recent_steps(60)]
    assert max(set(causes), key=causes.count) is cause
    assert causes.count(cause) > 45


class Subclass(RecordingScheduler):
    """Changes nothing."""


class Delegating:
    """Is no scheduler, but hands everything on to one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, "inner", RecordingScheduler(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)


@pytest.mark.parametrize("scheduler_cls", [Subclass, Delegating])
@pytest.mark.parametrize("is_async", [False, True])
def test_a88_custom_scheduler_class_loses_a_fast_path_or_a_queue(scheduler_cls: Any, is_async: bool) -> None:
    def life(cls: Any) -> list[Any]:
        draw = random.Random(88)
        engine = Engine(
            scheduler_cls=cls,
            usable=20,
            max_num_batched_tokens=64,
            max_num_seqs=8,
            policy="priority",
            prefix_caching=True,
            async_scheduling=is_async,
        )
        for index in range(60):
            engine.add(f"r{index}", draw.randint(1, 100), draw.randint(1, 30), priority=draw.randint(0, 3))
            live = sorted(engine.sched.requests)
            act = draw.choice([engine.core.abort, engine.core.preempt, engine.core.hold, engine.core.release])
            act([draw.choice(live)])
            engine.steps(3)
        engine.core.release(list(engine.sched.requests))
        taken = engine.run()
        assert engine.core.self_check() == []
        plans = [plan.num_scheduled_tokens for plan in engine.plans]
        return [plans, taken.tokens, engine.reasons(), engine.sched.stats.counters()]

    assert life(scheduler_cls) == life(RecordingScheduler)
    assert issubclass(Subclass, Scheduler)
