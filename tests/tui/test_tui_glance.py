"""What an operator asks first is on the screen of every size, without a key, and in the first lines of help."""

import pytest

from schedtop.tui.panels import FOCUSABLE

LAYOUTS = [(80, 24), (120, 40), (200, 50)]
sizes = pytest.mark.parametrize("size", LAYOUTS, ids=lambda size: f"{size[0]}x{size[1]}")


@sizes
async def test_who_was_preempted_last_and_for_whom_is_said_in_every_layout(at, busy_link, size) -> None:
    async with at(busy_link, size) as desk:
        last = desk.app.view.snapshot.recent_preemptions[-1]
        whom = "itself" if last.beneficiary == last.victim else last.beneficiary
        assert f"{last.victim} for {whom}" in desk.panel("preempted_line")


@sizes
async def test_why_the_first_in_the_queue_waits_is_said_in_every_layout(at, busy_link, size) -> None:
    async with at(busy_link, size) as desk:
        head = desk.app.view.snapshot.waiting[0]
        shown = desk.panel("next_line")
        assert head.request_id in shown
        assert head.wait_detail in shown


@sizes
async def test_the_budget_and_the_key_to_the_knobs_are_on_screen_in_every_layout(at, busy_link, size) -> None:
    async with at(busy_link, size) as desk:
        budget = desk.panel("budget_line" if size[0] == 80 else "budget")
        step = desk.app.view.snapshot.last_step
        assert f"{step.num_prefill_tokens + step.num_decode_tokens}/{step.budget}" in budget
        assert "5 knobs" in desk.panel("keys")
        await desk.press("5")
        assert "› max_num_batched_tokens" in desk.panel("knobs"), "the budget's knob is the first one"


@sizes
async def test_a_staged_value_shows_the_way_to_a_change_that_undoes_itself(at, busy_link, size) -> None:
    async with at(busy_link, size) as desk:
        await desk.press("5", "minus")
        shown = desk.panel("knobs")
        assert "512 → 480" in shown
        assert "Enter apply" in shown and "c for 60 s" in shown and "Esc drop" in shown


@sizes
async def test_help_answers_what_is_asked_first_before_anything_else(at, busy_link, size) -> None:
    async with at(busy_link, size) as desk:
        await desk.press("question_mark")
        top = desk.panel("dialog").splitlines()[1:12]
        words = "\n".join(top)
        for asked in ("preempted last, and for whom", "first in the queue wait", "token budget", "safely", "60 s"):
            assert asked in words
        assert "…" not in words, "nothing is cut off"


@sizes
@pytest.mark.parametrize("name", FOCUSABLE)
async def test_the_key_of_each_panel_shows_it_in_every_layout(at, busy_link, size, name) -> None:
    async with at(busy_link, size) as desk:
        await desk.press(str(FOCUSABLE.index(name) + 1))
        assert name in desk.app._main.board.plan
        assert desk.app._main.board.panels[name].region.height > 3
        assert desk.ui.focus == name


@sizes
async def test_an_idle_engine_says_idle_and_no_limit(at, engine_link, size) -> None:
    async with at(engine_link, size) as desk:
        shown = desk.panel("sequences_line")
        assert "idle" in shown and "limit" not in shown
        assert "nobody waits" in desk.panel("next_line")
        assert "nobody since start" in desk.panel("preempted_line")


async def test_an_engine_whose_work_has_ended_says_idle_though_its_last_step_had_a_limit(at, new_link, send) -> None:
    link = new_link()
    send(link, "r0", 16, 4)
    link.play(20)
    async with at(link) as desk:
        assert desk.app.view.snapshot.last_step is not None
        assert "idle" in desk.panel("sequences_line")


async def test_before_the_first_news_nothing_is_called_not_exported(at, engine_link) -> None:
    engine_link.publish = lambda: None
    async with at(engine_link, (200, 50)) as desk:
        for name in desk.app._main.board.plan:
            assert "not exported" not in desk.panel(name)


async def test_a_latency_that_the_engine_does_not_export_says_so_and_is_no_zero(at, busy_link) -> None:
    told = busy_link.latencies
    busy_link.latencies = lambda: {name: value for name, value in told().items() if name != "e2e"}
    async with at(busy_link) as desk:
        row = next(line for line in desk.panel("latency").splitlines() if "e2e" in line)
        assert "not exported by this engine" in row


async def test_a_burst_between_two_looks_is_shown_as_a_peak(at, new_link, send) -> None:
    """A50: thirty requests that come and go between two snapshots."""
    from schedtop.control.measures import Peaks
    from schedtop.control.messages import SnapshotUpdate
    from schedtop.engine.snapshot import Viewport
    from schedtop.tui.state import Received

    link = new_link()
    async with at(link) as desk:
        peaks = Peaks(num_steps=40, running=16, waiting=14, blocks_in_use=90)
        update = SnapshotUpdate(snapshot=link.core.snapshot(Viewport()), peaks=peaks)
        desk.app.receive(Received(link.target, update))
        await desk.pilot.pause()
        assert "peak in 10 s: 16 running, 14 waiting" in desk.panel("sequences_line")
        link.clock.advance(20.0)
        await desk.news()
        assert "peak" not in desk.panel("sequences_line")


async def test_the_first_of_the_queue_is_said_to_be_out_of_sight_when_it_is_filtered_away(at, busy_link) -> None:
    async with at(busy_link) as desk:
        name = desk.app.view.snapshot.waiting[-1].request_id
        await desk.press("slash", *name.replace("-", ""), "escape", "slash", *name.split("-")[1], "enter")
        assert "not in sight" in desk.panel("next_line")


async def test_an_engine_that_is_ending_says_so(at, engine_link) -> None:
    from schedtop.control.messages import SnapshotUpdate
    from schedtop.engine.snapshot import Viewport
    from schedtop.tui.state import Received

    async with at(engine_link) as desk:
        update = SnapshotUpdate(snapshot=engine_link.core.snapshot(Viewport()), shutting_down=True)
        desk.app.receive(Received(engine_link.target, update))
        await desk.pilot.pause()
        assert "the engine is ending" in desk.panel("alerts")


def test_a_step_longer_than_a_second_leaves_no_hole_in_the_plot() -> None:
    from schedtop.tui.state import EngineView, Sample
    from schedtop.tui.views.budget import Bucket, buckets

    def sample(mono: float, step_s: float) -> Sample:
        return Sample(mono=mono, num_steps=1, budget=256, prefill=256, decode=0, draft=0, step_s_max=step_s,
                      num_running=1, num_waiting=0, preemptions=0, lost_tokens=0, generated_tokens=0)  # fmt: skip

    view = EngineView("x", samples=(sample(2.5, 0.1), sample(6.5, 3.4)))
    found = buckets(view, 6.9, 7)
    assert [bucket != Bucket() for bucket in found] == [False, False, True, True, True, True, True]
    idle = buckets(EngineView("x", samples=(sample(2.5, 0.1), sample(6.5, 0.1))), 6.9, 7)
    assert [bucket != Bucket() for bucket in idle] == [False, False, True, False, False, False, True]
