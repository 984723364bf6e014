"""Explain: why each request waits, what limited each step, what each preemption cost. All of it adds up."""

import pytest
from factories import Engine, make_request, make_requests, make_scheduler, run_steps

from schedtop.engine.sched.explain import wait_reason, waiting_by_reason
from schedtop.engine.snapshot import LimitedBy, PauseState, Viewport, WaitReason


def waits(sched, request_id: str) -> tuple[str, str]:
    reason, detail = wait_reason(sched, sched.requests[request_id])
    return reason.value, detail


def test_a_head_that_lacks_blocks_says_how_many_and_those_behind_say_whom_they_wait_for() -> None:
    sched = make_scheduler(usable=40)
    for request in (make_request("r0", 256, 64), make_request("big", 512), *make_requests(3, 32, prefix="c")):
        sched.add_request(request)
    run_steps(sched)
    assert waits(sched, "big") == ("KV blocks", "needs 32 blocks, 24 free")
    assert waits(sched, "c2") == ("behind a blocked request", "behind big: needs 32 blocks, 24 free")
    assert waiting_by_reason(sched) == {"KV blocks": 1, "behind a blocked request": 3}


def test_each_cause_of_waiting_has_its_words() -> None:
    sched = make_scheduler(max_num_batched_tokens=32, max_num_seqs=2)
    for request in make_requests(4, 16, 50):
        sched.add_request(request)
    assert waits(sched, "r0")[0] == "not looked at yet"
    run_steps(sched, 2)
    assert waits(sched, "r3") == ("sequence cap", "2 running, cap 2")
    sched.hold(sched.requests["r3"])
    assert waits(sched, "r3")[0] == "held by operator"
    assert waiting_by_reason(sched) == {"sequence cap": 1, "held by operator": 1}
    sched.pause_state = PauseState.PAUSED_NEW
    assert waits(sched, "r2") == ("paused", "engine paused (new)")


def test_a_spent_budget_and_a_prompt_that_exceeds_it_are_told_apart() -> None:
    for chunked, reason in ((True, "budget spent"), (False, "prompt exceeds budget")):
        sched = make_scheduler(max_num_batched_tokens=32, enable_chunked_prefill=chunked)
        sched.add_request(make_request("a", 32, 50) if chunked else make_request("a", 20, 50))
        sched.add_request(make_request("b", 20))
        sched.add_request(make_request("c", 20))
        run_steps(sched)
        assert waits(sched, "b")[0] == reason
        assert sum(waiting_by_reason(sched).values()) == 2
    assert waits(sched, "b")[1] == "its 20 tokens don't fit the 12 left of the budget"


def test_an_admission_stopped_by_a_preemption_says_so() -> None:
    sched = make_scheduler(usable=4)
    for request in make_requests(2, 32, 100):
        sched.add_request(request)
    run_steps(sched)
    sched.add_request(make_request("late", 1))
    run_steps(sched)
    assert waits(sched, "late")[0] == "admission stopped by a preemption"
    assert waiting_by_reason(sched) == {"admission stopped by a preemption": 2}


def test_requests_passed_over_are_counted_by_their_own_reason_whatever_stopped_the_step() -> None:
    sched = make_scheduler(usable=10, admission="skip", max_num_seqs=2)
    sched.add_request(make_request("first", 100, 50))
    run_steps(sched)
    for request in (make_request("big", 100), *make_requests(3, 1, 50, prefix="tiny")):
        sched.add_request(request)
    run_steps(sched)
    assert waits(sched, "big") == ("KV blocks", "needs 7 blocks, 3 free")
    assert waits(sched, "tiny1") == ("sequence cap", "2 running, cap 2")
    assert waiting_by_reason(sched) == {"KV blocks": 1, "sequence cap": 2}


def test_reasons_add_up_to_all_that_wait_and_count_the_same_way_as_the_rows() -> None:
    engine = Engine(usable=10, max_num_batched_tokens=64)
    for index in range(8):
        engine.add(f"r{index}", 60, 30)
    engine.steps(2)
    engine.core.hold(["r7", "r5"])
    snapshot = engine.core.snapshot(Viewport())
    counted: dict[str, int] = {}
    for row in snapshot.waiting:
        assert row.wait_reason is not None
        counted[row.wait_reason.value] = counted.get(row.wait_reason.value, 0) + 1
    assert counted == snapshot.waiting_by_reason
    assert sum(counted.values()) == snapshot.num_waiting == 6
    assert snapshot.num_deferred == 2
    assert [row.position for row in snapshot.waiting] == list(range(6))


def limits(engine: Engine) -> LimitedBy:
    engine.step()
    return engine.core.recent_steps(1)[0].limited_by


def test_each_step_says_what_limited_it() -> None:
    by_budget = Engine(max_num_batched_tokens=64)
    by_budget.add("r", 200)
    assert limits(by_budget) is LimitedBy.BUDGET

    by_slots = Engine(max_num_seqs=1)
    by_slots.add("a", 20)
    by_slots.add("b", 20)
    assert limits(by_slots) is LimitedBy.SEQUENCES

    by_blocks = Engine(usable=4)
    by_blocks.add("a", 40)
    by_blocks.add("b", 40)
    assert limits(by_blocks) is LimitedBy.BLOCKS

    by_compute = Engine()
    by_compute.add("a", 40)
    assert limits(by_compute) is LimitedBy.COMPUTE

    paused = Engine()
    paused.add("a", 40)
    paused.step()
    paused.core.pause("wait")
    paused.add("b", 40)
    assert limits(paused) is LimitedBy.PAUSED


def test_a_step_that_preempted_was_limited_by_blocks() -> None:
    sched = make_scheduler(usable=4)
    for request in make_requests(2, 32, 100):
        sched.add_request(request)
    run_steps(sched)
    assert run_steps(sched)[0].limited_by is LimitedBy.BLOCKS


@pytest.mark.parametrize("is_async", [False, True])
def test_starving_decodes_are_limited_by_the_budget(is_async: bool) -> None:
    engine = Engine(async_scheduling=is_async)
    for name in "abc":
        engine.add(name, 4, 50)
    engine.steps(3)
    engine.core.set_knobs({"max_num_batched_tokens": 2})
    engine.steps(3)
    assert engine.core.recent_steps(1)[0].limited_by is LimitedBy.BUDGET


def test_a_preemption_adds_to_the_totals_and_to_the_rows() -> None:
    engine = Engine(usable=6)
    engine.add("a", 32, 40)
    engine.add("b", 32, 40)
    while not engine.sched.stats.preemptions:
        engine.step()
    snapshot = engine.core.snapshot(Viewport(detail="b"))
    record = snapshot.recent_preemptions[0]
    assert (record.victim, record.beneficiary, record.num_lost_tokens, record.num_preemptions) == ("b", "a", 48, 1)
    assert (record.num_blocks_freed, record.free_blocks_before, record.free_blocks_after) == (3, 0, 3)
    assert snapshot.counters.lost_tokens == 48
    row = snapshot.waiting[0]
    assert (row.request_id, row.num_preemptions, row.num_lost_tokens, row.status) == ("b", 1, 48, "preempted")
    assert [event.kind.value for event in snapshot.detail.events] == ["queued", "scheduled", "preempted"]
    steps = engine.core.recent_steps(1000)
    assert sum(step.num_preempted for step in steps) == 1
    assert sum(step.num_lost_tokens for step in steps) == 48


def test_a_requests_lifeline_is_complete() -> None:
    engine = Engine(usable=6)
    engine.add("a", 32, 40)
    engine.add("b", 32, 40)
    engine.run()
    events = [event for taken in engine.taken.steps for event in taken.events if event.request_id == "b"]
    assert [event.kind.value for event in events] == ["queued", "scheduled", "preempted", "resumed", "finished"]
    everything = [event.sequence for taken in engine.taken.steps for event in taken.events]
    assert everything == list(range(1, len(everything) + 1))


def test_counting_reasons_looks_at_no_waiting_request() -> None:
    sched = make_scheduler(max_num_seqs=1)
    for request in make_requests(50, 4, 50):
        sched.add_request(request)
    run_steps(sched)

    class Untouchable:
        def __len__(self) -> int:
            return 49

        def __contains__(self, request: object) -> bool:
            raise AssertionError("looked for a request")

        def __iter__(self) -> None:
            raise AssertionError("walked the queue")

    sched.waiting = Untouchable()
    assert waiting_by_reason(sched) == {"sequence cap": 49}


def test_the_kv_map_shows_each_use_of_a_block_and_marks_the_request_asked_for() -> None:
    engine = Engine(usable=8, prefix_caching=True)
    engine.add("done", 32, 1, seed=1)
    engine.run()
    engine.add("a", 40, 20, seed=1)
    engine.add("b", 40, 20, seed=1)
    engine.step()
    kv_map = engine.core.snapshot(Viewport(kv_cells=8, detail="b")).kv_map
    assert kv_map.blocks_per_cell == 1
    assert sorted(kv_map.cells) == sorted("ssuu....")
    assert len(kv_map.marks) == 3


def test_a_request_that_waits_for_its_result_in_flight_says_so() -> None:
    engine = Engine(async_scheduling=True)
    engine.add("r", 20, 50)
    engine.steps(3)
    engine.core.preempt(["r"])
    reason, detail = wait_reason(engine.sched, engine.sched.requests["r"])
    assert reason is WaitReason.IN_FLIGHT
    assert "1 tokens to come" in detail
    assert engine.core.snapshot(Viewport()).num_deferred == 1
