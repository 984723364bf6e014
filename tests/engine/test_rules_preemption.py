"""Preemption: recomputation, who is the victim, where it goes, and what it is told to have cost."""

import pytest
from factories import Engine, make_request, make_requests, make_scheduler, oracle, run_steps, tokens_of

from schedtop.engine.request import State


def running_full(usable: int = 4, count: int = 2, length: int = 32, **settings):
    """A scheduler whose pool is just filled by `count` requests that decode next."""
    sched = make_scheduler(usable=usable, reserve_full_prompt=False, **settings)
    requests = make_requests(count, length, max_tokens=100)
    for request in requests:
        sched.add_request(request)
    run_steps(sched)
    assert sched.kv.num_free == 0
    return sched, requests


def test_preemption_frees_the_blocks_forgets_what_was_computed_and_keeps_the_output() -> None:
    sched, (_, r1) = running_full()
    output = r1.output_token_ids
    plan = sched.schedule()
    assert plan.preempted == [r1]
    assert (r1.state, r1.num_computed_tokens, r1.blocks) == (State.PREEMPTED, 0, [])
    assert r1.output_token_ids == output != []
    assert tokens_of(plan) == {"r0": 1}


def test_a_preempted_request_samples_nothing_twice() -> None:
    engine = Engine(usable=6)
    prompts = {}
    for name in ("a", "b"):
        engine.add(name, 32, 40)
        prompts[name] = list(engine.sched.requests[name].token_ids)
    taken = engine.run()
    assert engine.sched.stats.preemptions > 0
    assert taken.tokens == {name: oracle(tokens, 40) for name, tokens in prompts.items()}


def test_under_fcfs_the_most_recently_admitted_is_the_victim() -> None:
    sched, (_, _, r2) = running_full(usable=6, count=3)
    assert sched.schedule().preempted == [r2]


def test_the_victim_may_be_the_request_itself() -> None:
    sched = make_scheduler(usable=4)
    first, last = make_request("first", 40, 100), make_request("last", 16, 100)
    sched.add_request(first)
    sched.add_request(last)
    run_steps(sched)
    plan = sched.schedule()  # `first` has room in its third block, `last` needs a second one and there is none
    assert plan.preempted == [last]
    assert plan.preemptions[0].beneficiary == "last"
    assert tokens_of(plan) == {"first": 1}


def test_under_priority_the_largest_value_goes_then_the_latest_arrival() -> None:
    sched = make_scheduler(usable=6, policy="priority")
    a = make_request("a", 32, 100, priority=1, arrival_time=3.0)
    b = make_request("b", 32, 100, priority=1, arrival_time=7.0)
    c = make_request("c", 32, 100, priority=0, arrival_time=9.0)
    for request in (a, b, c):
        sched.add_request(request)
    run_steps(sched)
    assert [request.request_id for request in sched.running] == ["c", "a", "b"]
    assert sched.schedule().preempted == [b]


def test_priority_looks_at_all_running_also_at_those_already_planned_in_this_step() -> None:
    sched = make_scheduler(usable=4, policy="priority")
    low = make_request("low", 20, 100, priority=9)
    high = make_request("high", 32, 100, priority=0)
    sched.add_request(low)
    run_steps(sched)
    sched.add_request(high)
    run_steps(sched)
    assert [request.request_id for request in sched.running] == ["low", "high"]
    plan = sched.schedule()
    assert plan.preempted == [low]
    assert tokens_of(plan) == {"high": 1}


def test_a_withdrawn_victim_refunds_its_tokens_to_the_budget() -> None:
    sched = make_scheduler(usable=4, policy="priority")
    low, high = make_request("low", 20, 100, priority=9), make_request("high", 31, 100, priority=0)
    sched.add_request(low)
    run_steps(sched)
    sched.add_request(high)
    run_steps(sched, 2)
    tail = make_request("tail", 1, 100, priority=1)
    sched.apply_knobs(_with(sched, max_num_batched_tokens=2))
    sched.running.append(tail)  # stands behind `high`, with a token left to compute and room for it
    tail.state, sched.requests["tail"] = State.RUNNING, tail
    tail.blocks, tail.num_slots = [sched.kv.pool.blocks[0]], 16
    plan = sched.schedule()
    assert plan.preempted == [low]
    assert tokens_of(plan) == {"high": 1, "tail": 1}  # the token withdrawn from `low` serves `tail`
    assert plan.budget == 0


def test_a_victim_goes_to_the_front_of_the_queue() -> None:
    sched, _ = running_full()
    sched.add_request(make_request("older", 10))
    sched.schedule()
    assert [request.request_id for request in sched.waiting] == ["r1", "older"]


def test_several_victims_come_back_in_their_old_order() -> None:
    sched = make_scheduler(usable=5)
    grower, s1, s2 = make_request("grower", 47, 100), make_request("s1", 10, 100), make_request("s2", 10, 100)
    for request in (grower, s1, s2):
        sched.add_request(request)
    run_steps(sched)
    sched.preempt(s2)
    sched.preempt(s1)
    assert [request.request_id for request in sched.waiting] == ["s1", "s2"]


def test_several_victims_of_one_step_keep_their_order() -> None:
    sched = make_scheduler(usable=5, max_num_batched_tokens=64, reserve_full_prompt=False)
    long = make_request("long", 70, 4)
    sched.add_request(long)
    sched.apply_knobs(_with(sched, long_prefill_token_threshold=16))
    others = make_requests(3, 20, 60, prefix="s")
    sched.add_request(others[0])
    sched.add_request(others[1])
    run_steps(sched)
    sched.apply_knobs(_with(sched, long_prefill_token_threshold=0))
    plan = sched.schedule()
    assert [victim.request_id for victim in plan.preempted] == ["s1", "s0"]
    assert [request.request_id for request in sched.waiting] == ["s0", "s1"]


def _with(sched, **changes):
    from schedtop.engine.knobs import change_knobs, knob_table

    return change_knobs(sched.knobs, changes, knob_table(sched.config))


def test_under_priority_a_victim_re_enters_by_priority_not_at_the_front() -> None:
    sched = make_scheduler(usable=4, policy="priority")
    low = make_request("low", 20, 100, priority=5)
    high = make_request("high", 32, 100, priority=0)
    middle = make_request("middle", 10, 100, priority=3)
    sched.add_request(low)
    run_steps(sched)
    sched.add_request(high)
    run_steps(sched)
    sched.add_request(middle)
    assert sched.schedule().preempted == [low]
    assert [request.request_id for request in sched.waiting] == ["middle", "low"]


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    sched = make_scheduler(usable=4)
    a, b = make_requests(2, 32, 100)
    sched.add_request(a)
    sched.add_request(b)
    run_steps(sched)
    sched.add_request(make_request("tiny", 1))
    plan = sched.schedule()
    assert plan.preempted == [b]
    assert sched.kv.num_free == 1  # `tiny` would fit
    assert plan.admissions == []


def test_a_resumed_request_joins_the_running_ones_at_the_end() -> None:
    sched = make_scheduler(usable=8)
    for request in make_requests(3, 16, 100):
        sched.add_request(request)
    run_steps(sched)
    sched.preempt(sched.running[0])
    plan = run_steps(sched)[0]
    assert [request.request_id for request in sched.running] == ["r1", "r2", "r0"]
    assert plan.output.resumed_req_ids == ["r0"]
    assert plan.output.preempted_req_ids == ["r0"]


def test_an_operators_preemption_does_not_stop_admission() -> None:
    sched = make_scheduler(usable=8)
    for request in make_requests(2, 16, 100):
        sched.add_request(request)
    run_steps(sched)
    sched.preempt(sched.running[1])
    assert list(tokens_of(sched.schedule())) == ["r0", "r1"]


def test_the_record_of_a_preemption_names_everything() -> None:
    sched, (_, r1) = running_full(usable=4)
    sched.schedule()
    record = sched.stats.recent_preemptions[-1]
    assert (record.victim, record.beneficiary, record.num_lost_tokens) == ("r1", "r0", 32)
    assert (record.num_blocks_freed, record.free_blocks_before, record.free_blocks_after) == (2, 0, 2)
    assert (record.num_preemptions, record.step) == (1, 2)
    assert sched.stats.lost_tokens == 32
    assert r1.num_lost_tokens == 32


def test_an_operators_preemption_has_no_beneficiary() -> None:
    engine = Engine(usable=8)
    engine.add("r", 20, 50)
    engine.steps(2)
    assert engine.core.preempt(["r"]).changed == ["r"]
    record = engine.sched.stats.recent_preemptions[-1]
    assert record.beneficiary is None
    assert record.num_lost_tokens == 21


@pytest.mark.parametrize(("rule", "victim"), [("newest", "c"), ("least_computed", "b"), ("most_blocks", "a")])
def test_the_victim_knob_chooses_whom_to_throw_out(rule: str, victim: str) -> None:
    sched = make_scheduler(usable=7, victim=rule)
    lengths = {"a": 63, "b": 10, "c": 25}
    for name, length in lengths.items():
        sched.add_request(make_request(name, length, 100))
    run_steps(sched)
    sched.kv.pool.take(sched.kv.num_free)
    run_steps(sched)
    assert [v.request_id for v in sched.schedule().preempted] == [victim]


def test_a_request_preempted_max_preemptions_times_is_spared_while_another_exists() -> None:
    sched = make_scheduler(usable=6, max_preemptions=1)
    requests = make_requests(3, 32, 100)
    for request in requests:
        sched.add_request(request)
    run_steps(sched)
    requests[2].num_preemptions = 1
    assert sched.schedule().preempted == [requests[1]]


def test_when_all_have_reached_the_cap_the_rule_chooses_among_all() -> None:
    sched, requests = running_full(usable=6, count=3, max_preemptions=1)
    for request in requests:
        request.num_preemptions = 1
    assert sched.schedule().preempted == [requests[2]]


def test_preempt_on_arrival_is_off_by_default_and_priority_evicts_nobody() -> None:
    sched = make_scheduler(usable=4, policy="priority")
    low = make_request("low", 60, 4, priority=9)
    sched.add_request(low)
    run_steps(sched)
    sched.add_request(make_request("high", 32, priority=0))
    plan = sched.schedule()
    assert plan.preempted == []
    assert tokens_of(plan) == {"low": 1}


def test_priority_does_not_reorder_the_budget_among_running_requests() -> None:
    sched = make_scheduler(policy="priority", max_num_batched_tokens=64)
    low = make_request("low", 100, 50, priority=9)
    high = make_request("high", 100, 50, priority=0)
    sched.add_request(low)
    run_steps(sched)
    sched.add_request(high)
    assert tokens_of(sched.schedule()) == {"low": 36, "high": 28}


def test_preempt_on_arrival_evicts_the_largest_priority_value_for_blocks() -> None:
    sched = make_scheduler(usable=6, policy="priority", preempt_on_arrival=True)
    for name, priority in (("p5", 5), ("p9", 9)):
        sched.add_request(make_request(name, 40, 40, priority=priority))
    run_steps(sched)
    sched.add_request(make_request("high", 40, 40, priority=0))
    plan = sched.schedule()
    assert [victim.request_id for victim in plan.preempted] == ["p9"]
    assert plan.preemptions[0].beneficiary == "high"
    assert tokens_of(plan) == {"p5": 1, "high": 40}


def test_preempt_on_arrival_evicts_for_a_sequence_slot_too_but_not_among_equals() -> None:
    sched = make_scheduler(policy="priority", preempt_on_arrival=True, knobs={"max_num_seqs": 1})
    sched.add_request(make_request("first", 16, 50, priority=1))
    run_steps(sched)
    sched.add_request(make_request("equal", 16, 50, priority=1))
    assert sched.schedule().preempted == []
    sched.add_request(make_request("urgent", 16, 50, priority=0))
    assert [victim.request_id for victim in sched.schedule().preempted] == ["first"]


def test_preempt_on_arrival_throws_nobody_out_for_one_who_would_not_fit_even_then() -> None:
    sched = make_scheduler(usable=8, policy="priority", preempt_on_arrival=True)
    sched.add_request(make_request("equal", 60, 40, priority=0))
    sched.add_request(make_request("low", 30, 40, priority=9))
    run_steps(sched)
    sched.add_request(make_request("high", 90, 40, priority=0))  # needs 6, would have 4
    plan = sched.schedule()
    assert plan.preempted == []
    assert plan.blocked.request.request_id == "high"


def test_one_evicted_on_arrival_is_not_one_whose_new_blocks_somebody_admitted_just_now_builds_upon() -> None:
    engine = Engine(
        usable=10, policy="priority", preempt_on_arrival=True, prefix_caching=True, max_num_batched_tokens=200
    )
    engine.add("low", 100, 4, seed=1, priority=9)
    engine.core.set_knobs({"max_num_batched_tokens": 48})
    engine.step()
    engine.core.set_knobs({"max_num_batched_tokens": 200})
    engine.add("twin", 100, 4, seed=1, priority=0)
    engine.add("other", 40, 4, priority=1)
    engine.run()
    assert set(engine.reasons().values()) == {"length"}


def test_preemption_and_drafts_drop_the_drafts() -> None:
    sched = make_scheduler(max_num_speculative_tokens=2)
    request = make_request("r", 16, 50)
    sched.add_request(request)
    run_steps(sched)
    request.spec_token_ids = [1, 2]
    sched.preempt(request)
    assert request.spec_token_ids == []
