"""Async scheduling: planned ahead, same tokens as in sync, and what may be wasted."""

from collections.abc import Callable

import pytest
from factories import Engine, make_request, make_scheduler, oracle, sample, tokens_of

from schedtop.engine.runner.fake import FakeRunner
from schedtop.engine.sched.output import ModelRunnerOutput
from schedtop.engine.snapshot import WaitReason

DEPTHS = [1, 2, 3]


def test_a_step_is_planned_while_the_one_before_is_in_flight() -> None:
    sched = make_scheduler(async_scheduling=True)
    sched.add_request(make_request("r", 10))
    first, second = sched.schedule(), sched.schedule()
    assert (tokens_of(first), tokens_of(second)) == ({"r": 10}, {"r": 1})
    assert list(sched.in_flight) == [first, second]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_output_is_that_of_the_synchronous_schedule(depth: int, num_drafts: int) -> None:
    def run(**settings) -> dict[str, list[int]]:
        engine = Engine(usable=14, max_num_batched_tokens=48, max_num_speculative_tokens=num_drafts, **settings)
        engine.runner.proposer = lambda tokens: [*oracle(tokens, len(tokens) % 3), 5, 6][:num_drafts]
        for index, length in enumerate((40, 17, 90, 5, 33)):
            engine.add(f"r{index}", length, 20 + index)
        taken = engine.run()
        assert engine.sched.stats.preemptions > 0
        return taken.tokens

    assert run(async_scheduling=True, async_depth=depth) == run()


@pytest.mark.parametrize("depth", DEPTHS)
def test_no_step_goes_past_a_known_max_tokens(depth: int) -> None:
    engine = Engine(async_scheduling=True, async_depth=depth)
    engine.add("r", 10, 4)
    engine.run()
    assert engine.total_planned("r") == 13
    assert engine.sched.stats.wasted_tokens == 0


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_end_found_late_wastes_one_token_per_step_in_flight_and_counts_it(depth: int) -> None:
    tokens = make_request("r", 10).token_ids
    expected = oracle(tokens, 8)
    engine = Engine(async_scheduling=True, async_depth=depth, eos=[expected[3]])
    engine.add("r", tokens, 30)
    taken = engine.run()
    assert taken.tokens["r"] == expected[:4]
    assert engine.sched.stats.wasted_tokens == depth - 1
    assert engine.total_planned("r") == 13 + depth - 1


def test_the_model_length_is_known_ahead_too() -> None:
    engine = Engine(async_scheduling=True, max_model_len=16)
    engine.add("r", 10, 400)
    taken = engine.run()
    assert len(taken.tokens["r"]) == 6
    assert engine.sched.stats.wasted_tokens == 0


def test_placeholders_count_tokens_in_flight_and_are_never_negative() -> None:
    engine = Engine(async_scheduling=True, max_num_batched_tokens=64)
    for index in range(4):
        engine.at(index, lambda index=index: engine.add(f"r{index}", 200, 8))
    engine.add("first", 3, 3)
    while engine.core.has_work or len(engine.taken.ends) < 5:
        engine.step()
        assert all(request.num_output_placeholders >= 0 for request in engine.sched.requests.values())
    assert set(engine.reasons().values()) == {"length"}


def test_a_result_for_a_request_preempted_meanwhile_is_delivered_before_it_runs_again() -> None:
    sched = make_scheduler(async_scheduling=True)
    request = make_request("r", 10, 50)
    sched.add_request(request)
    first = sched.schedule()
    sched.preempt(request)
    assert request.defer_reason is WaitReason.IN_FLIGHT
    assert tokens_of(sched.schedule()) == {}
    outputs = sched.update_from_output(first, ModelRunnerOutput([[5]]))
    assert outputs[0].new_token_ids == [5]
    assert (request.num_output_placeholders, request.defer_reason) == (0, None)
    assert tokens_of(sched.schedule()) == {"r": 11}


def test_a_result_that_ends_a_request_preempted_meanwhile_ends_it() -> None:
    sched = make_scheduler(async_scheduling=True)
    request = make_request("r", 10, 1)
    sched.add_request(request)
    first = sched.schedule()
    sched.preempt(request)
    outputs = sched.update_from_output(first, ModelRunnerOutput([[5]]))
    assert outputs[0].finish_reason == "length"
    assert (sched.requests, sched.num_waiting, sched.num_waiting_tokens) == ({}, 0, 0)


def test_dropped_results_are_sampled_again_and_counted_as_wasted() -> None:
    engine = Engine(async_scheduling=True)
    engine.add("r", 10, 12)
    engine.steps(4)
    request = engine.sched.requests["r"]
    engine.core.preempt(["r"])
    engine.sched.drop_in_flight(request)
    taken = engine.run()
    assert taken.tokens["r"] == oracle(make_request("r", 10).token_ids, 12)
    assert engine.sched.stats.wasted_tokens == 1


def test_an_abort_with_a_step_in_flight_frees_at_once_and_ignores_the_result() -> None:
    engine = Engine(async_scheduling=True)
    engine.add("r", 40, 50)
    engine.steps(3)
    engine.core.abort(["r"])
    assert engine.num_free == engine.sched.kv.pool.num_usable
    engine.run()
    assert engine.reasons() == {"r": "abort"}


@pytest.mark.parametrize("defers", [False, True])
def test_defer_block_free_keeps_blocks_until_every_step_that_may_write_them_is_done(defers: bool) -> None:
    sched = make_scheduler(async_scheduling=True, defers_block_free=defers, usable=8)
    request = make_request("r", 40, 50)
    sched.add_request(request)
    plans = [sched.schedule(), sched.schedule()]
    sched.preempt(request)
    usage = sched.kv.usage()
    assert (usage.pending, usage.free) == ((3, 5) if defers else (0, 8))
    assert usage.free + usage.in_use + usage.held + usage.pending == usage.usable
    sched.update_from_output(plans[0], sample(plans[0]))
    assert sched.kv.usage().pending == (3 if defers else 0)
    sched.update_from_output(plans[1], sample(plans[1]))
    assert sched.kv.usage().free == 8


def test_async_can_be_switched_on_and_off_on_a_running_engine() -> None:
    engine = Engine(usable=12, max_num_batched_tokens=32)
    for index in range(4):
        engine.add(f"r{index}", 30 + index, 30)
    turn = [True, False]
    for step in range(5, 60, 5):
        engine.at(step, lambda step=step: engine.core.set_knobs({"async_scheduling": turn[step // 5 % 2]}))
    prompts = {request_id: list(request.token_ids) for request_id, request in engine.sched.requests.items()}
    taken = engine.run()
    assert taken.tokens == {request_id: oracle(tokens, 30) for request_id, tokens in prompts.items()}


def test_results_are_taken_in_the_order_of_the_plans() -> None:
    sched = make_scheduler(async_scheduling=True)
    sched.add_request(make_request("r", 10))
    sched.schedule()
    second = sched.schedule()
    with pytest.raises(AssertionError, match="order of the plans"):
        sched.update_from_output(second, sample(second))


class BrokenRunner(FakeRunner):
    """Fails in the step of a given number."""

    def __init__(self, failing_step: int) -> None:
        super().__init__()
        self.failing_step = failing_step

    def execute_model(self, scheduler_output):
        if scheduler_output.step == self.failing_step:
            raise RuntimeError("out of memory")
        return super().execute_model(scheduler_output)


@pytest.mark.parametrize("depth", [0, *DEPTHS])
@pytest.mark.parametrize("failing_step", [1, 2, 3, 5])
def test_a_broken_step_ends_its_requests_with_the_error_and_the_engine_goes_on(depth: int, failing_step: int) -> None:
    runner = BrokenRunner(failing_step)
    engine = Engine(
        runner,
        async_scheduling=bool(depth),
        async_depth=max(depth, 1),
        prefix_caching=True,
        max_num_batched_tokens=48,
    )
    engine.add("a", 100, 10, seed=1)
    engine.at(2, lambda: engine.add("twin", 100, 10, seed=1))
    engine.at(4, lambda: engine.add("later", 100, 10, seed=1))
    engine.at(12, lambda: engine.add("last", 100, 10, seed=1))
    taken = engine.run()
    expected = oracle(make_request("a", 100, seed=1).token_ids, 10)
    for request_id, end in taken.ends.items():
        if end.finish_reason == "error":
            assert end.detail == f"step {failing_step} failed: RuntimeError: out of memory"
            assert request_id in engine.plans[failing_step - 1].num_scheduled_tokens
        else:
            assert taken.tokens[request_id] == expected
    assert taken.ends["last"].finish_reason == "length"
    assert "error" in engine.reasons().values()
    assert engine.core.self_check() == []
    assert engine.num_free == engine.sched.kv.pool.num_usable
    assert set(runner.requests) <= {"last"}  # the runner was told of every end


Act = Callable[[Engine], object]


@pytest.mark.parametrize(
    "act",
    [
        lambda engine: engine.core.preempt(["r"]),
        lambda engine: (engine.core.hold(["r"]), engine.core.release(["r"])),
        lambda engine: engine.core.reset_prefix_cache(preempt_running=True),
        lambda engine: (engine.core.pause("keep"), engine.core.resume()),
        lambda engine: engine.core.set_knobs({"async_scheduling": False}),
    ],
    ids=["preempt", "hold and release", "reset", "pause and resume", "knob"],
)
@pytest.mark.parametrize("depth", DEPTHS)
def test_no_token_is_lost_or_doubled_whatever_an_operator_does_with_steps_in_flight(act: Act, depth: int) -> None:
    for step in range(1, 8):
        engine = Engine(async_scheduling=True, async_depth=depth, prefix_caching=True, max_num_batched_tokens=16)
        engine.add("r", 30, 10)
        engine.at(step, lambda engine=engine: act(engine))
        taken = engine.run()
        assert taken.tokens["r"] == oracle(make_request("r", 30).token_ids, 10)


def test_a_broken_step_wakes_those_who_waited_for_what_it_held() -> None:
    engine = Engine(BrokenRunner(1), usable=4, async_scheduling=True)
    engine.add("holds all", 60, 1)  # no second step is planned for it: an empty one follows
    engine.add("waits", 60, 3)
    engine.run()
    assert engine.reasons() == {"holds all": "error", "waits": "length"}
