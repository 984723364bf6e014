"""The acting half of the main screen: keys that change the engine, and the dialogs. What is sent is in `hands.py`."""

from collections.abc import Sequence
from dataclasses import replace

from schedtop.control.asked_forecast import NoForecast
from schedtop.engine.errors import KnobRefused, SchedtopError
from schedtop.engine.knobs import KnobValue
from schedtop.engine.snapshot import PauseState, RequestStatus
from schedtop.tui import staging
from schedtop.tui.advisor import find
from schedtop.tui.foresight import Prospect
from schedtop.tui.hands import Operator, named
from schedtop.tui.plays import Play
from schedtop.tui.screens.watching import WatchScreen
from schedtop.tui.state import Action, Outcome, Ui


class MainScreen(WatchScreen):
    """One engine on screen, with hands."""

    def __init__(self, ui: Ui, is_ascii: bool = False) -> None:
        super().__init__(ui, is_ascii)
        self.operator = Operator(lambda: self.owner.link, self.report)

    # ---- foreseeing -----------------------------------------------------------------------------------------

    def change(self, ui: Ui) -> None:
        """Take a new `ui`; values newly staged are looked ahead with, at the side."""
        if ui.staged and (ui.prospect is None or ui.prospect.changes != ui.staged):
            ui = replace(ui, prospect=self._begin_forecast(dict(ui.staged)))
        elif not ui.staged and ui.prospect is not None:
            self.workers.cancel_group(self, "forecast")
            ui = replace(ui, prospect=None)
        super().change(ui)

    def _begin_forecast(self, staged: dict[str, KnobValue]) -> Prospect:
        self.workers.cancel_group(self, "forecast")
        if why := self._why_no_forecast(staged):
            return Prospect(changes=staged, reason=why)
        self.run_worker(self._foresee(self.owner.current, staged), group="forecast")
        return Prospect(changes=staged)

    def _why_no_forecast(self, staged: dict[str, KnobValue]) -> str:
        view = self.owner.view
        if not (view.can("GetState") and view.can("GetStepModel")):
            return "not exported by this engine"
        wrong = [spec.name for spec in view.specs if spec.name in staged and staging.problem(spec, staged[spec.name])]
        return f"{wrong[0]} would be refused" if wrong else ""

    async def _foresee(self, target: str, staged: dict[str, KnobValue]) -> None:
        try:
            found = Prospect(changes=staged, forecast=await self.owner.options.forecaster(target, staged))
        except (NoForecast, OSError) as fault:
            found = Prospect(changes=staged, reason=str(fault))
        if target == self.owner.current and self.ui.staged == staged:
            self.change(replace(self.ui, prospect=found))

    # ---- acting ---------------------------------------------------------------------------------------------

    async def action_enter(self) -> None:
        """Details of the selected request; in the knob panel, stage or apply; in that of playbooks, start or stop."""
        if self.ui.focus == "knobs":
            await self._enter_knobs()
        elif self.ui.focus == "playbooks":
            self._enter_playbooks()
        elif row := self._selected():
            self.change(replace(self.ui, detail=row.request_id))
            self.owner.show_detail(row.request_id)

    async def _enter_knobs(self) -> None:
        if self.ui.is_read_only:
            return
        if self.ui.entry:
            self._stage_entry()
        elif self.ui.staged:
            await self._apply(confirmed=False)

    def _stage_entry(self) -> None:
        snapshot = self.owner.view.snapshot
        if snapshot is None:
            return
        try:
            self.change(staging.entered(self.ui, self.owner.view.specs, snapshot.knobs))
        except KnobRefused as refusal:
            self.change(replace(self.ui, entry=""))
            self.report(Action("stage", Outcome.REFUSED, str(refusal)))

    def action_turn(self, direction: int) -> None:
        """Stage the next value of the selected knob."""
        snapshot = self.owner.view.snapshot
        if snapshot is None or self.ui.is_read_only:
            return
        if self.ui.focus != "knobs":
            self.ui = replace(self.ui, focus="knobs")
        self.change(staging.turned(self.ui, self.owner.view.specs, snapshot.knobs, direction))

    def action_slide(self, direction: int) -> None:
        """Move the selected knob's slider; only where it is on screen."""
        snapshot = self.owner.view.snapshot
        if snapshot is not None and self.ui.focus == "knobs" and not self.ui.is_read_only:
            self.change(staging.slid(self.ui, self.owner.view.specs, snapshot.knobs, direction))

    def stage_share(self, share: float) -> None:
        """Stage the value at a place of the selected knob's slider."""
        snapshot, spec = self.owner.view.snapshot, staging.current(self.ui, self.owner.view.specs)
        if snapshot is None or spec is None or self.ui.is_read_only or "knob_up" in self.dead_keys():
            return
        self.change(staging.staged(self.ui, spec, staging.value_at(spec, share), snapshot.knobs))

    async def action_apply_confirmed(self) -> None:
        """Apply the staged values for a minute; a value still being typed is staged first."""
        if self.ui.entry:
            self._stage_entry()
        elif self.ui.staged:
            await self._apply(confirmed=True)

    async def _apply(self, confirmed: bool) -> None:
        snapshot = self.owner.view.snapshot
        if snapshot is None:
            return
        staged = dict(self.ui.staged)
        self.owner.start(self._applied(staged, snapshot.generation, confirmed))

    async def _applied(self, staged: dict[str, KnobValue], generation: int, confirmed: bool) -> None:
        if await self.operator.apply(staged, generation, confirmed):
            rest = {name: value for name, value in self.ui.staged.items() if staged.get(name) != value}
            self.change(replace(self.ui, staged=rest))

    def action_undo(self) -> None:
        """Roll the last change back."""
        self.owner.start(self.operator.undo())

    def action_keep(self) -> None:
        """Keep a change that would be undone by itself."""
        pending = self.owner.view.update.pending_change if self.owner.view.update else None
        if pending is None:
            self.report(Action("keep", Outcome.REFUSED, "no change is waiting to be kept"))
        else:
            self.owner.start(self.operator.keep(pending.change_id))

    def action_advise(self) -> None:
        """Stage what the first finding proposes."""
        finding = next((finding for finding in find(self.scene()) if finding.changes), None)
        specs = self.owner.view.specs
        if finding is None:
            self.report(Action("stage advice", Outcome.REFUSED, "no finding proposes a change"))
            return
        place = next((i for i, spec in enumerate(specs) if spec.name in finding.changes), 0)
        staged = {**self.ui.staged, **finding.changes}
        self.change(replace(self.ui, focus="knobs", knob=place, staged=staged, entry=""))

    def action_priority(self, direction: int) -> None:
        """Run the chosen requests sooner (-1: smaller number) or later (+1)."""
        if rows := self._chosen():
            self.owner.start(self.operator.move_priority(rows, direction))

    def action_abort(self) -> None:
        """Abort the chosen requests, once confirmed."""
        if ids := [row.request_id for row in self._chosen()]:
            self.owner.ask(f"Abort {named(ids)}?", "Their clients get what was generated so far.",
                           lambda: self.operator.abort(ids))  # fmt: skip

    def action_hold(self) -> None:
        """Hold the chosen requests, or release them when all are held, once confirmed."""
        rows = self._chosen()
        ids = [row.request_id for row in rows]
        if not ids:
            return
        are_held = all(row.status is RequestStatus.DEFERRED for row in rows)
        what = "Release" if are_held else "Hold"
        text = (
            "They are scheduled again."
            if are_held
            else "They keep their place, but nothing is computed until released."
        )
        self.owner.ask(f"{what} {named(ids)}?", text, lambda: self.operator.hold(ids, release=are_held))

    def action_preempt(self) -> None:
        """Throw the chosen requests back to the queue, once confirmed."""
        if ids := [row.request_id for row in self._chosen()]:
            self.owner.ask(f"Preempt {named(ids)}?", "What was computed for them is thrown away.",
                           lambda: self.operator.preempt(ids))  # fmt: skip

    def action_drain(self) -> None:
        """Admit nobody new, once confirmed."""
        self.owner.ask("Drain the engine?", "Nobody new is admitted until it is resumed.", self.operator.drain)

    def action_reset_cache(self) -> None:
        """Forget cached prefixes, once confirmed."""
        self.owner.ask("Reset the prefix cache?", "Prompts are computed anew.", self.operator.reset_cache)

    def action_self_check(self) -> None:
        """Have the engine prove its accounting."""
        self.owner.start(self.operator.self_check())

    def stage(self, name: str, text: str) -> None:
        """Stage a value typed for a knob by name."""
        snapshot, specs = self.owner.view.snapshot, self.owner.view.specs
        place = next((i for i, spec in enumerate(specs) if spec.name == name), None)
        if place is not None and snapshot is not None and not self.ui.is_read_only:
            self.ui = replace(self.ui, focus="knobs", knob=place, entry=text)
            self._stage_entry()

    def action_pause_engine(self) -> None:
        """Pause or resume the engine, once confirmed."""
        snapshot = self.owner.view.snapshot
        if snapshot is None:
            return
        is_paused = snapshot.pause is not PauseState.RUNNING
        title = "Resume the engine?" if is_paused else "Pause the engine?"
        text = (
            "Requests go on where they stand."
            if is_paused
            else f"{snapshot.num_running} running requests freeze where they are; nothing is lost."
        )
        self.owner.ask(title, text, lambda: self.operator.pause(resume=is_paused))

    # ---- playbooks ------------------------------------------------------------------------------------------

    def _plays(self) -> Sequence[Play]:
        return self.owner.plays.of(self.owner.current)

    def action_panel(self, name: str) -> None:
        """Focus a panel; playbooks are read when they are first looked at."""
        super().action_panel(name)
        if name == "playbooks":
            self.owner.start(self.owner.plays.find())

    def _enter_playbooks(self) -> None:
        plays, target = self._plays(), self.owner.current
        if not plays:
            return
        play = plays[min(self.ui.play, len(plays) - 1)]
        if self.ui.is_read_only or not self.owner.view.can("SetKnobs"):
            why = "read-only" if self.ui.is_read_only else "this engine does not take it, or is not connected"
            self.report(Action(play.name, Outcome.REFUSED, why))
        elif play.fault:
            self.report(Action(play.name, Outcome.REFUSED, play.fault))
        elif play.is_running:
            self.owner.ask(f"Stop {play.name}?", "It takes its changes back first.",
                           lambda: self.owner.plays.stop(target, play.name))  # fmt: skip
        else:
            self.owner.start(self._try_dry(target, play.name))

    async def _try_dry(self, target: str, name: str) -> None:
        self.report(Action(f"trying {name} dry", Outcome.PENDING))
        try:
            lines = await self.owner.plays.try_dry(target, name)
        except SchedtopError as error:
            self.report(Action(f"trying {name} dry", Outcome.REFUSED, str(error)))
            return
        self.report(Action(f"tried {name} dry", Outcome.DONE, "nothing was changed"))
        if target == self.owner.current:
            self.owner.ask_to_start(name, lines, lambda: self.owner.plays.start(target, name))

    # ---- other screens ---------------------------------------------------------------------------------------

    def action_help(self) -> None:
        """Show all keys."""
        self.owner.show_help(self.dead_keys())

    def action_commands(self) -> None:
        """Open the command registry."""
        self.owner.show_commands()

    def action_themes(self) -> None:
        """Choose a theme."""
        self.owner.show_themes()

    def action_fleet(self) -> None:
        """Show all engines."""
        self.owner.show_fleet()

    def action_audit(self) -> None:
        """Show who changed what."""
        self.owner.start(self.owner.show_audit())

    def action_screenshot(self) -> None:
        """Save the screen as SVG."""
        self.report(Action("screenshot", Outcome.DONE, self.owner.save_picture()))

    def action_quit(self) -> None:
        """Leave; asks first while playbooks run from here."""
        if count := self.owner.plays.num_running:
            runs = "A playbook runs" if count == 1 else f"{count} playbooks run"
            text = f"{runs} from this screen; leaving stops that, and takes the changes back."
            self.owner.ask("Leave schedtop?", text, self.owner.leave)
        else:
            self.owner.exit()
