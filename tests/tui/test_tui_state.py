"""Messages folded into what the screen knows: staleness, restarts, history, rates."""

import pytest

from schedtop.control.messages import EventBatch, SnapshotUpdate
from schedtop.engine.snapshot import EngineCoreEvent, EventKind, Viewport
from schedtop.tui.alerts import find_alerts
from schedtop.tui.state import (
    STALE_AFTER_S,
    EngineView,
    LinkDown,
    LinkUp,
    Phase,
    Received,
    Remembered,
    Scene,
    fold,
    rates,
)


def seen(link, view: EngineView | None = None) -> EngineView:
    """What a screen knows after a greeting and one update."""
    view = fold(view or EngineView(link.target), LinkUp(link.target, link.welcome()), link.clock())
    return fold(view, Received(link.target, SnapshotUpdate(snapshot=link.core.snapshot(Viewport()))), link.clock())


def texts(scene: Scene) -> str:
    return "\n".join(alert.text for alert in find_alerts(scene))


def test_data_is_stale_once_nothing_came_in_for_a_while(engine_link) -> None:
    view = seen(engine_link)
    now = engine_link.clock()
    assert not view.is_stale(now + STALE_AFTER_S)
    assert view.is_stale(now + STALE_AFTER_S + 0.1)
    assert "no data for 1.6 s" in texts(Scene(view, now=now + STALE_AFTER_S + 0.1))


def test_the_engines_clock_stands_still_on_stale_data(engine_link) -> None:
    view = seen(engine_link)
    now = engine_link.clock()
    assert view.engine_now(now + 1.0) == view.snapshot.mono + 1.0
    assert view.engine_now(now + 100.0) == view.snapshot.mono


def test_a_lost_engine_keeps_its_data_as_past_and_says_since_when(engine_link) -> None:
    view = seen(engine_link)
    now = engine_link.clock()
    view = fold(view, LinkDown(view.target, "the socket was closed", 0.5), now + 1)
    view = fold(view, LinkDown(view.target, "no engine answers", 0.8), now + 2)
    assert view.phase is Phase.LOST
    assert view.is_stale(now + 2)
    assert "ENGINE GONE for 9.0 s, reconnecting: no engine answers" in texts(Scene(view, now=now + 10))


def test_the_same_boot_id_means_nothing_was_lost(engine_link) -> None:
    view = seen(engine_link)
    view = fold(view, LinkDown(view.target, "gone", 0.5), 1001.0)
    view = fold(view, LinkUp(view.target, engine_link.welcome()), 1002.0)
    assert view.restarted_at is None
    assert view.snapshot is not None


def test_another_boot_id_forgets_the_old_data_and_says_that_changes_were_lost(engine_link) -> None:
    view = seen(engine_link)
    engine_link.boot_id = "boot-2"
    view = fold(view, LinkUp(view.target, engine_link.welcome()), 1002.0)
    assert view.snapshot is None
    assert "restarted (boot boot-2): live knob changes were lost" in texts(Scene(view, now=1003.0))


def test_missed_events_are_told(engine_link) -> None:
    event = EngineCoreEvent(sequence=9, kind=EventKind.QUEUED, step=1, mono=1000.0, wall=0.0)
    view = fold(seen(engine_link), Received("", EventBatch(events=[event], dropped=3)), 1000.0)
    assert "3 events were missed" in texts(Scene(view, now=1000.0))


def test_rates_are_unknown_before_two_samples_and_zero_on_an_idle_engine(engine_link) -> None:
    view = seen(engine_link)
    assert rates(view, engine_link.clock()) is None
    engine_link.clock.advance(5)
    view = fold(view, Received("", SnapshotUpdate(snapshot=engine_link.core.snapshot(Viewport()))), 1005.0)
    speed = rates(view, 1005.0)
    assert speed is not None
    assert (speed.generated, speed.preemptions, speed.lost) == (0, 0, 0)


def test_remembered_steps_come_before_what_the_screen_saw_and_never_twice(busy_link) -> None:
    records = busy_link.core.recent_steps(1000)
    view = fold(EngineView("x"), LinkUp("x", busy_link.welcome()), busy_link.clock())
    update = SnapshotUpdate(snapshot=busy_link.core.snapshot(Viewport()), steps=records[-10:])
    view = fold(view, Received("x", update), busy_link.clock())
    view = fold(view, Remembered("x", records), busy_link.clock())
    assert sum(sample.num_steps for sample in view.samples) == len(records)
    assert [sample.mono for sample in view.samples] == sorted(sample.mono for sample in view.samples)
    assert sum(sample.preemptions for sample in view.samples) == sum(record.num_preempted for record in records)


def test_rates_agree_with_the_step_records(busy_link) -> None:
    records = busy_link.core.recent_steps(1000)
    view = fold(EngineView("x"), LinkUp("x", busy_link.welcome()), busy_link.clock())
    view = fold(view, Remembered("x", records), busy_link.clock())
    view = fold(view, Received("x", SnapshotUpdate(snapshot=busy_link.core.snapshot(Viewport()))), busy_link.clock())
    speed = rates(view, busy_link.clock(), window_s=1000.0)
    span = records[-1].mono - view.samples[0].mono
    expected = sum(record.num_output_tokens for record in records if record.mono > view.samples[0].mono) / span
    assert speed is not None
    assert speed.generated == pytest.approx(expected, rel=0.05)
