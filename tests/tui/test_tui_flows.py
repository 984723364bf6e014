"""What each key does, from the key press to the acknowledgement, on a real engine behind a link in this process."""

from schedtop.control.messages import (
    AbortRequests,
    ConfirmChange,
    HoldRequests,
    Pause,
    PreemptRequests,
    Resume,
    SetKnobs,
    SetPriority,
    UndoChange,
)  # fmt: skip
from schedtop.engine.snapshot import PauseState
from schedtop.tui.keys import KEYS
from schedtop.tui.screens.live import DetailDialog
from schedtop.tui.screens.simple import AuditDialog, ChoiceDialog, ConfirmDialog, HelpDialog
from schedtop.tui.state import Action, Outcome


async def test_a_staged_value_is_applied_with_enter_and_acknowledged_with_its_step(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("5", "j", "minus")
        assert "16 → 15" in desk.panel("knobs")
        assert not desk.sent(SetKnobs), "staging sends nothing"
        step = busy_link.core.next_step
        await desk.press("enter")
        assert desk.sent(SetKnobs)[0].changes == {"max_num_seqs": 15}
        assert desk.sent(SetKnobs)[0].expect_generation == 0
        assert f"applied @ step {step}: max_num_seqs 16 → 15 (generation 1)" in desk.panel("action")
        assert desk.ui.staged == {}
        assert "→" not in desk.panel("knobs")


async def test_nothing_is_drawn_as_applied_before_the_engine_says_so(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("5", "j", "minus", "minus")
        await desk.pilot.press("enter")
        await desk.pilot.pause()
        assert desk.app.view.snapshot.knobs.max_num_seqs == 16, "no snapshot has come yet"
        row = next(line for line in desk.panel("knobs").splitlines() if "max_num_seqs" in line)
        assert " 16 " in row


async def test_a_typed_value_above_the_ceiling_is_marked_and_refused_with_the_reason(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("5", "j", "9", "9", "enter")
        assert "above its ceiling 16" in desk.panel("knobs")
        await desk.press("enter")
        action = desk.panel("action")
        assert "refused" in action
        assert "max_num_seqs=99 is above its ceiling 16" in action
        assert desk.ui.staged == {"max_num_seqs": 99}, "what was refused stays staged, to be corrected"


async def test_a_change_based_on_an_old_generation_is_refused(at, busy_link) -> None:
    async with at(busy_link) as desk:
        busy_link.core.set_knobs({"max_num_seqs": 8})
        await desk.pilot.press("5", "minus", "enter")
        await desk.pilot.pause()
        assert "refused" in desk.panel("action")


async def test_a_change_for_a_minute_counts_down_and_is_kept_with_a_key(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("5", "j", "minus", "c")
        assert desk.sent(SetKnobs)[0].confirm_within_s == 60.0
        assert "undone in 60 s unless kept (K)" in desk.panel("alerts") or "+" in desk.panel("alerts")
        await desk.press("K")
        assert desk.sent(ConfirmChange)[0].change_id == 7
        assert "kept" in desk.panel("action")


async def test_undo_rolls_the_last_change_back(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("5", "j", "minus", "enter", "u")
        assert desk.sent(UndoChange)
        assert "max_num_seqs 15 → 16" in desk.panel("action")
        assert busy_link.core.snapshot(busy_link.viewport).knobs.max_num_seqs == 16


async def test_space_toggles_a_switch_and_escape_drops_it(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("5", "j", "j", "j", "space")
        assert desk.ui.staged == {"long_prefill_token_threshold_adaptive": True}
        assert "off → on" in desk.panel("knobs")
        await desk.press("escape")
        assert desk.ui.staged == {}


async def test_priorities_of_tagged_requests_move_together_each_from_its_own(at, busy_link) -> None:
    async with at(busy_link) as desk:
        rows = {row.request_id: row.priority for row in desk.app.view.snapshot.running[:3]}
        await desk.press("space", "space", "space", "f7")
        moved = {rid: command.priority for command in desk.sent(SetPriority) for rid in command.select.ids}
        assert moved == {rid: priority - 1 for rid, priority in rows.items()}
        assert "✓" in desk.panel("action")
        await desk.press("left_square_bracket")
        back = {row.request_id: row.priority for row in desk.app.view.snapshot.running}
        assert all(back[rid] == priority for rid, priority in rows.items())


async def test_abort_asks_first_and_only_y_says_yes(at, busy_link) -> None:
    async with at(busy_link) as desk:
        victim = desk.app.view.snapshot.running[0].request_id
        await desk.press("x")
        assert isinstance(desk.app.screen, ConfirmDialog)
        assert victim in desk.panel("dialog")
        await desk.press("enter")
        assert isinstance(desk.app.screen, ConfirmDialog), "Enter alone aborts nobody"
        await desk.press("escape")
        assert not desk.sent(AbortRequests)
        await desk.press("x", "y")
        assert desk.sent(AbortRequests)[0].select.ids == [victim]
        assert "aborted @ step" in desk.panel("action")
        assert victim not in desk.panel("requests")


async def test_pause_and_resume_ask_first(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("P", "n")
        assert not desk.sent(Pause)
        await desk.press("P", "y")
        assert desk.sent(Pause)[0].mode == "keep"
        assert desk.app.view.snapshot.pause is PauseState.PAUSED_ALL
        assert "engine paused" in desk.panel("alerts")
        await desk.press("P", "y")
        assert desk.sent(Resume)
        assert desk.app.view.snapshot.pause is PauseState.RUNNING


async def test_hold_and_release_of_a_request(at, busy_link) -> None:
    async with at(busy_link) as desk:
        name = desk.app.view.snapshot.waiting[-1].request_id
        await desk.press("G", "H", "y")
        assert desk.sent(HoldRequests)[0].select.ids == [name]
        assert "held by operator" in desk.panel("requests")


async def test_p_holds_the_picture_still_while_news_come_in(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("p")
        before = desk.panel("requests")
        busy_link.play(20)
        await desk.news()
        assert desk.panel("requests") == before
        assert "SCREEN PAUSED" in desk.panel("identity")
        await desk.press("p")
        assert desk.panel("requests") != before


async def test_the_filter_narrows_while_it_is_typed_and_escape_clears_it(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("slash", "0", "0")
        assert busy_link.viewport.id_contains == "00"
        assert "filter ids: 00" in desk.panel("action")
        await desk.press("enter", "slash", "escape")
        assert busy_link.viewport.id_contains == ""
        await desk.press("slash", "exclamation_mark", "q", "enter")
        assert busy_link.viewport.id_contains == "!q"
        await desk.press("escape")
        assert busy_link.viewport.id_contains == ""


async def test_letters_typed_into_the_filter_are_no_commands(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("slash", "q", "x", "P")
        assert desk.app.is_running
        assert desk.ui.filter == "qxP"
        assert not desk.sent(AbortRequests)
        assert "no request matches the filter" in desk.panel("requests")


async def test_sorting_marks_its_column_and_asks_the_engine(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("greater_than_sign", "greater_than_sign", "I")
        assert (busy_link.viewport.sort, busy_link.viewport.descending) == ("priority", True)
        assert "▼" in desk.panel("requests").splitlines()[1]


async def test_enter_opens_the_request_and_lights_its_blocks(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("j", "enter")
        await desk.news()
        assert isinstance(desk.app.screen, DetailDialog)
        shown = desk.panel("dialog")
        assert "blocks" in shown
        assert "◆" in shown
        await desk.press("escape")
        assert "◆" in desk.panel("kv")
        await desk.press("escape")
        assert "◆" not in desk.panel("kv")


async def test_zoom_gives_the_focused_panel_the_screen_and_keeps_the_alerts(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("6", "z")
        assert set(desk.app._main.board.plan) == {"identity", "alerts", "decisions", "action", "keys"}
        await desk.press("escape")
        assert "requests" in desk.app._main.board.plan
        await desk.press("z", "z", "3")
        for name, place in desk.app._main.board.plan.items():
            region = desk.app._main.board.panels[name].region
            assert (region.x, region.y, region.width, region.height) == (place.x, place.y, place.width, place.height)


async def test_digits_choose_panels_and_tab_walks_them_on_the_small_screen(at, busy_link) -> None:
    async with at(busy_link, size=(80, 24)) as desk:
        assert "requests" in desk.app._main.board.plan
        for key, name in (
            ("1", "budget"),
            ("2", "kv"),
            ("4", "latency"),
            ("6", "decisions"),
            ("7", "advisor"),
            ("3", "requests"),
        ):
            await desk.press(key)
            assert name in desk.app._main.board.plan
        await desk.press("tab")
        assert desk.ui.focus == "latency"
        await desk.press("shift+tab", "shift+tab")
        assert desk.ui.focus == "kv"


async def test_escape_never_quits(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press(*["escape"] * 8)
        assert desk.app.is_running
        assert desk.ui.focus == "requests"


async def test_q_quits(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.pilot.press("q")
        await desk.pilot.pause()
        assert desk.app._exit


async def test_help_lists_every_key_of_the_table(at, busy_link) -> None:
    async with at(busy_link, size=(120, 100)) as desk:
        await desk.press("question_mark")
        assert isinstance(desk.app.screen, HelpDialog)
        shown = desk.panel("dialog")
        assert all(key.help in shown for key in KEYS)


async def test_the_command_registry_searches_and_runs(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("colon", *"undo")
        assert isinstance(desk.app.screen, ChoiceDialog)
        await desk.press("enter")
        assert desk.sent(UndoChange)


async def test_the_audit_log_is_shown(at, busy_link) -> None:
    busy_link.audit = [{
        "id": 1, "wall": 0.0, "step": 3, "uid": 7, "client": "cli", "on_behalf_of": "", "action": "SetKnobs",
        "outcome": "done", "before": {"max_num_seqs": 16}, "after": {"max_num_seqs": 8}, "reason": "test",
    }]  # fmt: skip
    async with at(busy_link) as desk:
        await desk.press("A")
        assert isinstance(desk.app.screen, AuditDialog)
        shown = desk.panel("dialog")
        assert "max_num_seqs 16 → 8" in shown
        assert "cli (uid 7)" in shown
        assert "(test)" in shown


async def test_the_advisors_change_is_staged_not_applied(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("a")
        assert desk.ui.staged
        assert desk.ui.focus == "knobs"
        assert not desk.sent(SetKnobs)


async def test_themes_are_previewed_and_escape_goes_back(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("f2", "down")
        assert desk.app.palette.name != "dark"
        await desk.press("escape")
        assert desk.app.palette.name == "dark"
        await desk.press("f2", "up", "enter")
        assert desk.app.palette.name != "dark"


async def test_a_read_only_screen_sends_nothing_and_greys_its_keys(at, busy_link) -> None:
    async with at(busy_link, read_only=True) as desk:
        await desk.press(
            "5", "minus", "plus", "9", "enter", "3", "x", "f7", "f8", "P", "u", "K", "H", "a", "c", "space"
        )
        assert {type(command).__name__ for command in busy_link.commands} <= {"Subscribe", "DumpSteps", "GetAudit"}
        assert "RO" in desk.panel("identity")
        assert "read-only" in desk.panel("action")
        await desk.press("question_mark")
        assert "(off now)" in desk.panel("dialog")


async def test_a_server_that_grants_reading_only_makes_the_screen_read_only(at, busy_link) -> None:
    busy_link.read_only = True
    async with at(busy_link) as desk:
        assert desk.ui.is_read_only


async def test_a_lost_engine_is_unmistakable_and_comes_back(at, busy_link) -> None:
    async with at(busy_link) as desk:
        busy_link.lose()
        await desk.pilot.pause()
        assert "✗ GONE" in desk.panel("identity")
        assert "ENGINE GONE" in desk.panel("alerts")
        await desk.press("x", "y")
        busy_link.boot_id = "boot-2"
        busy_link.connect()
        await desk.pilot.pause()
        assert "● live" in desk.panel("identity")
        assert "restarted (boot boot-2)" in desk.panel("alerts") or "+" in desk.panel("alerts")


async def test_stale_data_is_drawn_as_past_with_its_age(at, busy_link) -> None:
    async with at(busy_link) as desk:
        busy_link.clock.advance(3.2)
        desk.app.paint()
        assert "stale, 3.2 s old" in desk.panel("identity")
        styles = desk.app._main.board.panels["requests"]._styles_of
        assert styles("running") == styles("text") == desk.app.palette.style("text", is_stale=True)


async def test_all_aborted_at_once_leaves_zeros(at, busy_link) -> None:
    """A38: gauges must not freeze at the old values when traffic ends with an abort."""
    async with at(busy_link) as desk:
        busy_link.core.abort(busy_link.core.match(id_prefix=""))
        await desk.news()
        assert "idle: no request is running or waiting" in desk.panel("requests")
        assert desk.app.view.snapshot.pool.in_use == 0


async def test_a_click_selects_a_row_and_the_wheel_scrolls_its_part(at, busy_link) -> None:
    async with at(busy_link, size=(80, 24)) as desk:
        place = desk.app._main.board.plan["requests"]
        await desk.pilot.click(offset=(5, place.y + 4))
        assert desk.ui.cursor == desk.app.view.snapshot.running[2].request_id
        panel = desk.app._main.board.panels["requests"]
        panel.post_message(panel.Clicked(panel, 5, 4, wheel=1))
        await desk.pilot.pause()
        assert desk.ui.running_offset > 0


async def test_a_knob_is_staged_by_name_from_the_command_registry(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("colon", *"max_num_seqs", "space", *"12", "enter")
        assert desk.ui.staged == {"max_num_seqs": 12}
        await desk.press("colon", *"policy=prio", "enter", "enter")
        assert desk.sent(SetKnobs)[0].changes == {"max_num_seqs": 12, "policy": "priority"}


async def test_preempting_and_draining_from_the_registry_ask_first(at, busy_link) -> None:
    async with at(busy_link) as desk:
        victim = desk.app.view.snapshot.running[0].request_id
        await desk.press("colon", *"preempt", "enter")
        assert isinstance(desk.app.screen, ConfirmDialog)
        await desk.press("y")
        assert desk.sent(PreemptRequests)[0].select.ids == [victim]
        await desk.press("colon", *"drain", "enter", "n")
        await desk.press("colon", *"self-check", "enter")
        assert "nothing wrong" in desk.panel("action")


async def test_a_refusal_too_long_for_its_line_is_told_whole_until_a_key_is_pressed(at, busy_link) -> None:
    async with at(busy_link, size=(80, 24)) as desk:
        words = (
            "max_num_batched_tokens belongs to change 1 on trial: keep it with K, undo it with u, or wait 53 s for it"
        )
        desk.app._main.report(Action("", Outcome.REFUSED, words))
        whole_words = desk.panel("action").rstrip().rsplit(" ", 1)[0]
        assert f"{whole_words} {desk.panel('keys').replace('…', '').strip()}".endswith(words)
        await desk.press("j")
        assert "? help" in desk.panel("keys")


async def test_a_search_without_a_hit_says_so(at, busy_link) -> None:
    async with at(busy_link) as desk:
        await desk.press("colon", *"zzz")
        assert "nothing found" in desk.panel("dialog")
