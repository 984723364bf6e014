"""One axis of time for knob changes, preemptions and alerts; the audit log beside it."""

from dataclasses import replace

from screen_watch import Watch

from schedtop.engine.snapshot import EventKind
from schedtop.tui.cells import plain
from schedtop.tui.views.timeline import timeline


def lane(scene, label: str) -> str:
    lines = [plain(line) for line in timeline(scene, 80, 24).lines]
    return next(line for line in lines if line.startswith(label))


def marks(line: str) -> list[int]:
    return [place for place, char in enumerate(line[9:-8]) if char not in " ·"]


def test_a_stall_shows_in_the_lane_of_alerts_while_it_lasts_and_is_named_once(new_link, send) -> None:
    link = new_link()
    send(link, "r0", 16, 500)
    watch = Watch(link)
    watch.look(8)
    for _ in range(4):
        link.clock.advance(1.0)
        scene = watch.look(0)
    assert marks(lane(scene, "alerts")), "the stall of the last seconds"
    words = [plain(line) for line in timeline(scene, 80, 24).lines]
    assert sum("alert stalled" in line for line in words) == 1
    assert lane(scene, "alerts").rstrip().endswith(" 1"), "one stands now"
    link.play(8)
    scene = watch.look(8)
    assert lane(scene, "alerts").rstrip().endswith(" 0")


def test_a_quiet_engine_has_an_empty_lane_of_alerts(new_link, send) -> None:
    link = new_link()
    send(link, "r0", 16, 100)
    scene = Watch(link).look(40)
    assert marks(lane(scene, "alerts")) == []


def test_cause_and_effect_lie_in_one_column(new_link, send) -> None:
    """A knob change and the preemptions of the same second stand above each other."""
    link = new_link(num_kv_blocks=81, max_num_seqs=16, max_num_batched_tokens=2048, knobs={"max_num_seqs": 2})
    for number in range(16):
        send(link, f"r{number}", 64, 600)
    watch = Watch(link)
    watch.look(40)
    link.clock.advance(3.0)
    watch.look(4)
    link.core.set_knobs({"max_num_seqs": 16})
    for _ in range(60):
        scene = watch.look(4)
        if scene.view.snapshot.counters.preemptions:
            break
    outputs = link.core.take_outputs()
    told = [*link._events, *(outputs.events if outputs else [])]
    events = [event for event in told if event.kind is EventKind.KNOBS_CHANGED]
    assert events, "the change is an event"
    scene = replace(scene, view=replace(scene.view, events=tuple(events)))
    knob, preempted = marks(lane(scene, "knobs")), marks(lane(scene, "preempt"))
    assert len(knob) == 1
    assert preempted and min(preempted) >= knob[0], "no effect before its cause"


async def test_the_large_screen_has_axis_lifeline_and_audit_beside_each_other(at, busy_link) -> None:
    busy_link.change_elsewhere({"max_num_seqs": 9}, client="cli", reason="trial")
    async with at(busy_link, (200, 50)) as desk:
        plan = desk.app._main.board.plan
        assert plan["timeline"].x < plan["audit"].x
        assert plan["timeline"].y < plan["audit"].y + plan["audit"].height
        assert "cli          max_num_seqs 16 → 9" in desk.panel("audit")
