"""Pass 2: who is admitted, what stops admission, and the operator's alternatives."""

import pytest
from factories import Engine, make_request, make_requests, make_scheduler, run_steps, tokens_of

from schedtop.engine.knobs import change_knobs, knob_table
from schedtop.engine.request import State
from schedtop.engine.snapshot import PauseState, WaitReason


def turn(sched, **changes) -> None:
    sched.apply_knobs(change_knobs(sched.knobs, changes, knob_table(sched.config)))


def add(sched, *requests) -> None:
    for request in requests:
        sched.add_request(request)


def test_waiting_requests_are_admitted_in_order_of_arrival() -> None:
    sched = make_scheduler(max_num_batched_tokens=64)
    add(sched, *make_requests(4, 30))
    assert tokens_of(sched.schedule()) == {"r0": 30, "r1": 30, "r2": 4}


def test_admission_stops_at_the_cap_on_running_requests() -> None:
    sched = make_scheduler(max_num_seqs=2)
    add(sched, *make_requests(3, 10))
    plan = sched.schedule()
    assert list(tokens_of(plan)) == ["r0", "r1"]
    assert plan.blocked.reason is WaitReason.SEQUENCE_CAP


def test_a_head_that_does_not_fit_holds_back_all_behind_it() -> None:
    sched = make_scheduler(usable=10)
    add(sched, make_request("first", 100, 50))
    run_steps(sched)
    add(sched, make_request("big", 100), make_request("tiny", 1))
    plan = sched.schedule()
    assert plan.admissions == []
    assert plan.blocked.request.request_id == "big"


def test_the_watermark_applies_only_beside_running_requests() -> None:
    sched = make_scheduler(usable=10, watermark=0.3)
    add(sched, make_request("alone", 160, 1))
    assert tokens_of(run_steps(sched)[0]) == {"alone": 160}
    add(sched, make_request("first", 30, 50))
    run_steps(sched)
    add(sched, make_request("fits", 80, 50))  # 5 of 8 free: leaves 3
    assert "fits" in tokens_of(run_steps(sched)[0])
    add(sched, make_request("dips", 1, 50))
    plan = sched.schedule()
    assert "dips" not in tokens_of(plan)
    assert (plan.blocked.needed, plan.blocked.free) == (1, 0)


@pytest.mark.parametrize(("counts_null", "watermark_blocks"), [(True, 5), (False, 4)])
def test_the_watermark_counts_the_null_block_where_vllm_does(counts_null: bool, watermark_blocks: int) -> None:
    sched = make_scheduler(usable=9, watermark=0.5, watermark_counts_null_block=counts_null)
    assert sched.kv.watermark_blocks == watermark_blocks


def test_reserve_full_prompt_admits_only_if_the_whole_prompt_fits() -> None:
    for reserve, admitted in ((True, False), (False, True)):
        sched = make_scheduler(usable=10, max_num_batched_tokens=64, reserve_full_prompt=reserve)
        add(sched, make_request("first", 64, 50))
        run_steps(sched)
        add(sched, make_request("long", 120, 2))
        assert ("long" in tokens_of(sched.schedule())) is admitted


def test_reserve_full_prompt_counts_the_output_of_a_resumed_request_too() -> None:
    sched = make_scheduler(usable=6, max_num_batched_tokens=16)
    r = make_request("r", 15, 60)
    add(sched, r)
    run_steps(sched, 40)
    assert r.num_tokens > 48
    sched.preempt(r)
    turn(sched, kv_block_limit=3)
    assert sched.schedule().admissions == []


def test_reserve_output_admits_only_if_prompt_and_answer_fit_beside_what_is_promised() -> None:
    sched = make_scheduler(usable=10, reserve_output=True)
    add(sched, make_request("first", 16, 81))  # 6 blocks at its end
    add(sched, make_request("second", 16, 65))  # 5 at its end
    add(sched, make_request("third", 16, 17))
    plan = run_steps(sched)[0]
    assert tokens_of(plan) == {"first": 16}
    assert plan.blocked.request.request_id == "second"
    for _ in range(100):
        plan = run_steps(sched)[0]
    assert sched.stats.preemptions == 0


def test_reserve_output_never_keeps_a_request_that_may_try_its_luck_alone() -> None:
    engine = Engine(usable=4, reserve_output=True)
    engine.add("hungry", 16, 1000)
    engine.run()
    assert engine.reasons() == {"hungry": "capacity"}
    assert len(engine.taken.tokens["hungry"]) == 64 - 16 + 1


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_the_rest_of_the_budget() -> None:
    sched = make_scheduler(max_num_batched_tokens=64, enable_chunked_prefill=False)
    add(sched, make_request("a", 40), make_request("b", 40), make_request("c", 5))
    plan = run_steps(sched)[0]
    assert tokens_of(plan) == {"a": 40}
    assert (plan.blocked.reason, plan.blocked.needed, plan.blocked.free) == (WaitReason.WHOLE_PROMPT, 40, 24)
    assert tokens_of(sched.schedule()) == {"a": 1, "b": 40, "c": 5}


def test_without_chunked_prefill_the_threshold_comes_before_the_question_whether_it_fits() -> None:
    sched = make_scheduler(max_num_batched_tokens=64, enable_chunked_prefill=False, long_prefill_token_threshold=20)
    add(sched, make_request("a", 100), make_request("b", 30))
    assert tokens_of(sched.schedule()) == {"a": 20, "b": 20}


def test_priority_admits_lower_values_first_then_arrival_then_id() -> None:
    sched = make_scheduler(policy="priority", max_num_seqs=64)
    for name, priority, arrival in (("z", 1, 0.0), ("b", 0, 5.0), ("a", 0, 5.0), ("c", 0, 1.0), ("n", -3, 9.0)):
        add(sched, make_request(name, 4, priority=priority, arrival_time=arrival))
    assert list(tokens_of(sched.schedule())) == ["n", "c", "a", "b", "z"]


def test_switching_the_policy_re_orders_the_queue_at_once_and_back() -> None:
    sched = make_scheduler(knobs={"max_num_seqs": 1})
    add(sched, make_request("run", 4, 50))
    run_steps(sched)
    add(sched, make_request("later", 4, priority=0), make_request("sooner", 4, priority=-1))
    assert [r.request_id for r in sched.waiting] == ["later", "sooner"]
    turn(sched, policy="priority")
    assert [r.request_id for r in sched.waiting] == ["sooner", "later"]
    turn(sched, policy="fcfs")
    assert [r.request_id for r in sched.waiting] == ["later", "sooner"]


def test_a_new_priority_moves_a_waiting_request() -> None:
    sched = make_scheduler(policy="priority")
    add(sched, make_request("a", 4), make_request("b", 4))
    sched.set_priority(sched.requests["b"], -1)
    assert [r.request_id for r in sched.waiting] == ["b", "a"]


def test_a_request_that_is_not_ready_holds_up_nobody_and_keeps_its_place() -> None:
    sched = make_scheduler(max_num_batched_tokens=16)
    requests = make_requests(3, 16)
    add(sched, *requests)
    sched.hold(requests[0])
    assert tokens_of(run_steps(sched)[0]) == {"r1": 16}
    assert requests[0].state is State.DEFERRED
    sched.release(requests[0])
    assert [r.request_id for r in sched.waiting] == ["r0", "r2"]


def test_admission_skip_lets_smaller_requests_pass_a_blocked_one() -> None:
    sched = make_scheduler(usable=10, admission="skip")
    add(sched, make_request("first", 100, 50))
    run_steps(sched)
    add(sched, make_request("big", 100), make_request("tiny", 1, 40))
    plan = sched.schedule()
    assert list(tokens_of(plan)) == ["first", "tiny"]
    assert [blocked.request.request_id for blocked in plan.passed_over] == ["big"]


def test_admission_skip_is_bounded_by_max_bypass_within_a_step() -> None:
    sched = make_scheduler(usable=20, admission="skip", max_bypass=3)
    add(sched, make_request("first", 160, 50))
    run_steps(sched)
    add(sched, make_request("big", 200), *make_requests(6, 1, 50, prefix="tiny"))
    assert list(tokens_of(run_steps(sched)[0])) == ["first", "tiny0", "tiny1", "tiny2"]
    assert list(tokens_of(run_steps(sched)[0])) == ["first", "tiny0", "tiny1", "tiny2"]


def test_admission_skip_is_bounded_by_max_bypass_over_steps() -> None:
    sched = make_scheduler(usable=20, admission="skip", max_bypass=2)
    add(sched, make_request("first", 160, 100), make_request("big", 200))
    run_steps(sched)
    for name in ("t0", "t1", "t2"):
        add(sched, make_request(name, 1, 100))
        run_steps(sched)
    assert [r.request_id for r in sched.running] == ["first", "t0", "t1"]
    assert sched.requests["big"].num_bypassed == 2


def test_a_request_that_was_passed_starts_as_soon_as_it_fits() -> None:
    engine = Engine(usable=20, admission="skip", max_bypass=2)
    engine.add("first", 160, 10)
    engine.add("big", 200, 5)
    for index in range(10):
        engine.add(f"t{index}", 1, 5)
    taken = engine.run()
    assert len(taken.ends) == 12
    assert taken.first_step["big"] == 10
    assert engine.first_planned("t2") >= 10


def test_max_bypass_0_is_strict() -> None:
    sched = make_scheduler(usable=10, admission="skip", max_bypass=0)
    add(sched, make_request("first", 100, 50))
    run_steps(sched)
    add(sched, make_request("big", 100), make_request("tiny", 1))
    assert list(tokens_of(sched.schedule())) == ["first"]


def test_kv_block_limit_bounds_the_blocks_in_use() -> None:
    engine = Engine(usable=40, kv_block_limit=12)
    for index in range(6):
        engine.add(f"r{index}", 60, 20)
    while engine.core.has_work:
        engine.step()
        assert engine.sched.kv.usage().in_use <= 12
    assert set(engine.reasons().values()) == {"length"}


def test_lowering_kv_block_limit_drains_to_it_and_raising_it_admits_at_once() -> None:
    engine = Engine(usable=40)
    for index in range(6):
        engine.add(f"r{index}", 60, 30)
    engine.steps(3)
    assert engine.sched.kv.usage().in_use == 24
    engine.core.set_knobs({"kv_block_limit": 10})
    engine.steps(6)
    assert engine.sched.kv.usage().in_use <= 10
    engine.core.set_knobs({"kv_block_limit": 0})
    engine.step()
    assert len(engine.sched.running) == 6
    engine.run()
    assert set(engine.reasons().values()) == {"length"}


def test_lowering_the_sequence_cap_cuts_nobody() -> None:
    sched = make_scheduler(max_num_seqs=8)
    add(sched, *make_requests(8, 4, 50))
    run_steps(sched)
    turn(sched, max_num_seqs=2)
    assert len(tokens_of(run_steps(sched)[0])) == 8


def test_a_pause_for_new_requests_still_re_admits_preempted_ones() -> None:
    sched = make_scheduler()
    add(sched, *make_requests(2, 10, 50))
    run_steps(sched)
    sched.preempt(sched.running[0])
    add(sched, make_request("new", 4))
    sched.pause_state = PauseState.PAUSED_NEW
    assert list(tokens_of(run_steps(sched)[0])) == ["r1", "r0"]
    assert sched.has_unfinished


def test_readmission_under_pause_is_a_named_setting() -> None:
    sched = make_scheduler(readmits_when_paused=False)
    add(sched, *make_requests(2, 10, 50))
    run_steps(sched)
    sched.preempt(sched.running[0])
    sched.pause_state = PauseState.PAUSED_NEW
    assert list(tokens_of(run_steps(sched)[0])) == ["r1"]


def test_a_full_pause_schedules_nothing() -> None:
    sched = make_scheduler()
    add(sched, *make_requests(2, 10, 50))
    run_steps(sched)
    sched.pause_state = PauseState.PAUSED_ALL
    assert tokens_of(sched.schedule()) == {}
    assert not sched.has_unfinished


def test_the_usable_pool_leaves_out_the_null_block() -> None:
    assert make_scheduler(num_kv_blocks=10).kv.pool.num_usable == 9
    assert make_scheduler(num_kv_blocks=10, null_block=False).kv.pool.num_usable == 10
    sched = make_scheduler(usable=4)
    add(sched, make_request("r", 64, 1))
    plan = sched.schedule()
    assert 0 not in plan.output.scheduled_new_reqs[0].block_ids


def test_padding_drafts_join_a_single_token_to_a_row_of_decodes() -> None:
    for pads, share in ((True, 4), (False, 1)):
        sched = make_scheduler(max_num_speculative_tokens=3, pads_drafts=pads)
        add(sched, make_request("a", 10, 50))
        run_steps(sched)
        add(sched, make_request("one", 1, 50))
        plan = sched.schedule()
        assert tokens_of(plan)["one"] == share
        assert plan.spec_token_ids.get("one", []) == [-1] * (share - 1)


def test_padding_never_keeps_out_a_request_that_runs_alone() -> None:
    engine = Engine(
        max_num_speculative_tokens=3, prefix_caching=True, max_num_seqs=1, knobs={"max_num_batched_tokens": 2}
    )
    engine.runner.proposer = lambda tokens: [1, 2, 3]
    for name in ("first", "again"):
        engine.add(name, 33, 2, seed=1)
        engine.run()
    assert engine.reasons() == {"first": "length", "again": "length"}


def test_padding_never_needs_more_blocks_than_the_pool_has() -> None:
    engine = Engine(usable=2, max_num_speculative_tokens=6, prefix_caching=True)
    engine.runner.proposer = lambda tokens: [1, 2, 3, 4, 5, 6]
    engine.add("r", 28, 5, seed=1)
    engine.steps(2)
    engine.core.preempt(["r"])
    engine.run()
    assert engine.reasons() == {"r": "length"}
    engine.add("again", 29, 3, seed=1)
    engine.run()
    assert engine.reasons()["again"] == "length"
