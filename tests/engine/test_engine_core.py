"""EngineCore's boundary calls: what each finds, changes and tells."""

import pytest
from factories import Engine

from schedtop.engine.errors import Conflict, KnobRefused
from schedtop.engine.snapshot import PauseState, Viewport


def running_engine(**settings) -> Engine:
    engine = Engine(**settings)
    for name in ("a", "b", "c"):
        engine.add(name, 20, 50)
    engine.steps(3)
    return engine


def test_every_operation_is_idempotent_and_reports_the_state_it_found() -> None:
    engine = running_engine()
    core = engine.core
    first, second = core.hold(["a"]), core.hold(["a"])
    assert (first.found, first.changed) == ({"a": "running"}, ["a"])
    assert (second.found, second.changed) == ({"a": "preempted"}, [])
    assert core.release(["a"]).changed == ["a"]
    assert core.release(["a"]).changed == []
    assert core.preempt(["b"]).changed == ["b"]
    assert core.preempt(["b"]).changed == []
    assert core.set_priority(["b"], 3).changed == ["b"]
    assert core.set_priority(["b"], 3).changed == []
    assert core.abort(["c"]).changed == ["c"]
    assert core.abort(["c", "nobody"]).unknown == ["c", "nobody"]


def test_an_id_given_twice_is_touched_once() -> None:
    assert running_engine().core.preempt(["a", "a"]).changed == ["a"]


def test_match_finds_requests_by_all_conditions_given() -> None:
    engine = Engine(knobs={"max_num_seqs": 1})
    for name, priority in (("web-1", 0), ("web-2", 5), ("batch-1", 9)):
        engine.add(name, 20, 50, priority=priority)
    engine.step()
    core = engine.core
    assert core.match(id_prefix="web-") == ["web-1", "web-2"]
    assert core.match(priority_at_least=5) == ["web-2", "batch-1"]
    assert core.match(priority_at_most=5, status="waiting") == ["web-2"]
    assert core.match(ids=["batch-1", "gone"], id_prefix="b") == ["batch-1"]
    assert core.match(ids=["gone", "web-1"]) == ["gone", "web-1"]


def test_a_knob_change_is_all_or_nothing() -> None:
    engine = running_engine()
    before = engine.sched.knobs
    with pytest.raises(KnobRefused, match="max_num_seqs=0 is below its minimum 1"):
        engine.core.set_knobs({"watermark": 0.1, "max_num_seqs": 0})
    assert engine.sched.knobs is before
    assert engine.core.generation == 0


def test_a_knob_change_gives_a_receipt_and_an_event() -> None:
    engine = running_engine()
    change = engine.core.set_knobs({"watermark": 0.1, "policy": "priority"})
    assert (change.generation, change.before, change.after) == (
        1,
        {"policy": "fcfs", "watermark": 0.0},
        {"policy": "priority", "watermark": 0.1},
    )
    event = engine.core.take_outputs().events[-1]
    assert event.changes == {"policy": ("fcfs", "priority"), "watermark": (0.0, 0.1)}


def test_a_dry_run_checks_and_changes_nothing() -> None:
    engine = running_engine()
    change = engine.core.set_knobs({"max_num_seqs": 1}, dry_run=True)
    assert change.warnings and change.generation == 0
    assert engine.sched.knobs.max_num_seqs == 64
    with pytest.raises(KnobRefused):
        engine.core.set_knobs({"max_num_seqs": 65}, dry_run=True)


def test_a_change_based_on_an_old_generation_is_a_conflict() -> None:
    engine = running_engine()
    engine.core.set_knobs({"watermark": 0.1}, expect_generation=0)
    with pytest.raises(Conflict, match="generation 0, the knobs are at 1"):
        engine.core.set_knobs({"watermark": 0.2}, expect_generation=0)


def test_setting_a_knob_to_what_it_is_changes_no_generation() -> None:
    engine = running_engine()
    assert engine.core.set_knobs({"watermark": 0.0}).generation == 0


def test_pause_abort_ends_everything_and_admits_nobody() -> None:
    engine = running_engine()
    assert engine.core.pause("abort") is PauseState.RUNNING
    engine.add("late", 10)
    engine.run()
    assert engine.reasons() == {"a": "abort", "b": "abort", "c": "abort"}
    assert engine.sched.num_waiting == 1


def test_pause_wait_lets_running_and_preempted_requests_end() -> None:
    engine = running_engine()
    engine.core.preempt(["b"])
    engine.core.pause("wait")
    engine.add("late", 10)
    engine.run()
    assert engine.reasons() == {"a": "length", "b": "length", "c": "length"}
    assert engine.core.snapshot(Viewport()).waiting_by_reason == {"paused": 1}
    assert engine.core.resume() is PauseState.PAUSED_NEW
    engine.run()
    assert engine.reasons()["late"] == "length"


def test_pause_keep_freezes_everything_and_resume_goes_on() -> None:
    engine = running_engine()
    engine.core.pause("keep")
    blocks = engine.sched.kv.usage().in_use
    assert not engine.core.has_work
    assert engine.core.pause("keep") is PauseState.PAUSED_ALL
    assert engine.core.resume() is PauseState.PAUSED_ALL
    assert engine.core.resume() is PauseState.RUNNING
    assert engine.sched.kv.usage().in_use == blocks
    engine.run()
    assert len(engine.taken.ends) == 3


def test_a_drain_counts_down_to_zero_and_re_admits_preempted_requests() -> None:
    engine = Engine(usable=6)
    for name in ("a", "b"):
        engine.add(name, 32, 40)
    engine.steps(2)
    assert engine.core.start_drain() == 2
    engine.add("late", 10)
    counts = []
    while engine.core.has_work:
        engine.step()
        counts.append(engine.core.num_draining)
    assert engine.sched.stats.preemptions > 0
    assert counts[-1] == 0
    assert counts == sorted(counts, reverse=True)
    assert set(engine.reasons()) == {"a", "b"}


def test_the_self_check_finds_a_leak() -> None:
    engine = running_engine()
    assert engine.core.self_check() == []
    engine.sched.requests["a"].blocks[0].ref_cnt += 1
    shared = "1 shared blocks, their count says 0"
    assert engine.core.self_check() == ["block 1 has reference count 2 but 1 users", shared]


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda s: s.waiting.add(s.requests["a"]), "are in no list or in several"),
        (lambda s: setattr(s, "num_waiting_tokens", 5), "0 tokens wait, the count says 5"),
        (lambda s: setattr(s.requests["a"], "num_output_placeholders", -1), "has -1 placeholders"),
        (lambda s: setattr(s.requests["a"], "num_slots", 3), "has 3 slots in 2 blocks"),
        (lambda s: s.kv.pool.take(1), "has reference count 1 but 0 users"),
        (lambda s: s.kv.pool._letters.__setitem__(1, ord(".")), "block 1 is told as '.', it is 'u'"),
        (lambda s: s.requests["a"].blocks.pop(), "has reference count 1 but 0 users"),
    ],
)
def test_the_self_check_names_each_kind_of_fault(spoil, fault: str) -> None:
    engine = running_engine()
    spoil(engine.sched)
    assert any(fault in sentence for sentence in engine.core.self_check())


def test_a_snapshot_shows_the_viewports_part_and_exact_counts() -> None:
    engine = Engine(knobs={"max_num_seqs": 2})
    for index in range(10):
        engine.add(f"r{index}", 20, 50)
    engine.step()
    snapshot = engine.core.snapshot(Viewport(running_rows=1, waiting_rows=3, waiting_offset=2))
    assert (snapshot.num_running, snapshot.num_waiting) == (2, 8)
    assert [row.request_id for row in snapshot.running] == ["r0"]
    assert [(row.request_id, row.position) for row in snapshot.waiting] == [("r4", 2), ("r5", 3), ("r6", 4)]
    filtered = engine.core.snapshot(Viewport(id_contains="7"))
    assert [row.request_id for row in filtered.waiting] == ["r7"]
    assert (filtered.num_waiting, filtered.num_waiting_matched) == (8, 1)
    by_id = engine.core.snapshot(Viewport(sort="request_id", descending=True))
    assert by_id.waiting[0].request_id == "r9"


def test_recent_steps_are_the_newest_oldest_first() -> None:
    engine = running_engine()
    assert [record.step for record in engine.core.recent_steps(2)] == [2, 3]
    assert engine.core.recent_steps(0) == []


def test_latencies_are_counted_from_arrival_and_between_tokens() -> None:
    engine = Engine(max_num_batched_tokens=16)
    engine.add("r", 32, 3)
    engine.run()
    records = engine.core.recent_steps(10)
    assert [record.ttft for record in records] == [[], [2.0], [], []]
    assert [record.itl for record in records] == [[], [], [(1.0, 1)], [(1.0, 1)]]
    assert records[-1].e2e == [4.0]


def test_first_tokens_are_counted_once_however_often_a_request_is_preempted() -> None:
    engine = Engine(usable=6)
    for name in ("a", "b"):
        engine.add(name, 32, 40)
    engine.run()
    assert engine.sched.stats.preemptions > 0
    assert engine.sched.stats.first_tokens == 2
    assert sum(len(record.ttft) for record in engine.core.recent_steps(1000)) == 2
