"""The Textual application: holds links, views and theme, opens dialogs. What is drawn and what keys do is elsewhere."""

import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import RenderableType
from rich.style import Style
from textual.app import App
from textual.screen import Screen
from textual.theme import BUILTIN_THEMES, Theme

from schedtop.control.messages import Ack, DumpSteps, EventBatch, GetAudit, SnapshotUpdate, Subscribe
from schedtop.engine.snapshot import EventKind, StepRecord, Viewport
from schedtop.tui import ending
from schedtop.tui.alerts import folded
from schedtop.tui.foresight import Forecaster, forecast_apart
from schedtop.tui.keys import BY_ID
from schedtop.tui.link import Link, Refusal
from schedtop.tui.plays import Connect, ForeseeAt, Plays, connected, foresee_at
from schedtop.tui.screens.dialog import Dialog
from schedtop.tui.screens.live import DetailDialog, FleetDialog
from schedtop.tui.screens.main import MainScreen
from schedtop.tui.screens.simple import AuditDialog, Choice, ChoiceDialog, ConfirmDialog, HelpDialog, PlanDialog
from schedtop.tui.state import (
    Action,
    Audited,
    EngineView,
    LinkEvent,
    LinkUp,
    Outcome,
    Phase,
    Received,
    Remembered,
    Scene,
    Ui,
)
from schedtop.tui.text import TextReader
from schedtop.tui.theme import DEFAULT, WITHOUT_COLOUR, Palette, shipped
from schedtop.tui.views.audit import what, who
from schedtop.tui.widgets.output import narrowed
from schedtop.tui.widgets.panel import StyleOf

INTERVAL_S = 0.25
IDLE_PAINT_S = 1.0
"""Between paints while the engine does nothing: only clocks and the windows of old numbers move."""
HISTORY_STEPS = 3000
AUDIT_ROWS = 200
"""Rows in the audit dialog."""
AUDIT_ROWS_HELD = 20
FLEET_VIEWPORT = Viewport(running_rows=1, waiting_rows=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the screen is started. `tick_s=None` leaves repainting without news to the caller (tests)."""

    theme: str = DEFAULT
    palettes: Mapping[str, Palette] = field(default_factory=shipped)
    keymap: Mapping[str, str] = field(default_factory=dict)
    read_only: bool = False
    is_ascii: bool = False
    has_colour: bool = True
    clock: Callable[[], float] = time.monotonic
    tick_s: float | None = 0.5
    interval_s: float = INTERVAL_S
    picture_folder: Path = Path()
    forecaster: Forecaster = forecast_apart
    connect: Connect = connected
    """How a playbook's run gets a connection of its own."""
    foresee: ForeseeAt = foresee_at
    playbooks: Path | None = None
    """A folder of the operator's own playbooks."""
    notes: Sequence[str] = ()
    """Faults found in config or themes, to be told on screen."""


SCREEN_FD = 2
"""Where Textual draws: standard error."""
ABANDONED_EVERY_S = 1.0
"""How often the screen looks whether its terminal is still there."""


class SchedtopApp(App[None]):
    """The screen. One `EngineView` per link; the one at `current` is on screen."""

    ENABLE_COMMAND_PALETTE = False
    TITLE = "schedtop"
    CSS = "MainScreen { background: $background; } Screen { overflow: hidden; } * { scrollbar-size: 0 0; }"

    def __init__(self, links: Sequence[Link], options: Options | None = None) -> None:
        self.options = options or Options()
        has_colour = self.options.has_colour
        super().__init__(ansi_color=True if not has_colour else None)
        self.links = list(links)
        self.views = {link.target: EngineView(link.target, changed_at=self.clock()) for link in links}
        self.current = links[0].target
        self.keymap = self.options.keymap
        self.reader = TextReader()
        self.plays = Plays(self.paint_soon, self.options.connect, self.options.foresee, self.options.playbooks)
        self._wanted: dict[str, Viewport] = {}
        self._sent: dict[str, Viewport] = {}
        self._style_functions: dict[tuple[str, bool], StyleOf] = {}
        self._is_paint_due = False
        self._painted_at = -IDLE_PAINT_S
        notes = "; ".join(self.options.notes)
        note = Action("settings", Outcome.REFUSED, notes) if notes else None
        self._main = self._new_main(note)
        for palette in self.options.palettes.values():
            self.register_theme(_textual_theme(palette))
        self.palette = self._palette(self.options.theme if has_colour else WITHOUT_COLOUR)
        self.theme = f"schedtop-{self.palette.name}"

    def _new_main(self, action: Action | None) -> MainScreen:
        return MainScreen(Ui(is_read_only=self.options.read_only, action=action), self.options.is_ascii)

    @property
    def clock(self) -> Callable[[], float]:
        """The screen's monotonic clock."""
        return self.options.clock

    @property
    def view(self) -> EngineView:
        """What is known of the engine on screen."""
        return self.views[self.current]

    @property
    def link(self) -> Link:
        """The connection to the engine on screen."""
        return self._link_to(self.current)

    def _link_to(self, target: str) -> Link:
        return next(link for link in self.links if link.target == target)

    def _display(self, screen: Screen[Any], renderable: RenderableType | None) -> None:
        """Textual's own, with less written for a partial update."""
        super()._display(screen, narrowed(renderable))

    # ---- life -----------------------------------------------------------------------------------------------

    def on_mount(self) -> None:
        """Put the main screen up, connect, and take care to leave the terminal whole."""
        self.push_screen(self._main)
        for link in self.links:
            self.run_worker(link.run(self.receive), group="links", exit_on_error=True)
        if self.options.tick_s is not None:
            self.set_interval(self.options.tick_s, self._tick)
        if not self.is_headless:
            ending.exit_on_signals(self._leave)
            self.set_interval(ABANDONED_EVERY_S, lambda: ending.leave_if_abandoned(SCREEN_FD, self._leave))
        if len(self.links) > 1:
            self.call_after_refresh(self.show_fleet)

    def _leave(self, code: int) -> None:
        self.start(self.leave(code))

    async def leave(self, code: int = 0) -> None:
        """End the screen, after what runs from here has taken its changes back."""
        await self.plays.close()
        self.exit(return_code=code)

    def receive(self, event: LinkEvent) -> None:
        """Take news from a link."""
        before = self.views[event.target]
        self.views[event.target] = folded(before, event, self.clock())
        if isinstance(event, LinkUp):
            self._sent.pop(event.target, None)
            if event.welcome.read_only and event.target == self.current:
                self._main.ui = replace(self._main.ui, is_read_only=True)
            if event.target != self.current:
                self._wanted[event.target] = FLEET_VIEWPORT
            self._subscribe(event.target)
            self.start(self._fetch_history(event.target))
            self.start(self._fetch_audit(event.target, is_news=False))
        elif isinstance(event, Received) and isinstance(event.message, EventBatch) and _is_audited(event.message):
            self.start(self._fetch_audit(event.target, is_news=True))
        is_quiet = _is_idle(event, before) and before.phase is Phase.LIVE and not before.is_stale(self.clock())
        if not is_quiet or self.clock() - self._painted_at >= IDLE_PAINT_S:
            self.paint_soon()

    def paint_soon(self) -> None:
        """Paint once, however much news comes in before."""
        if not self._is_paint_due:
            self._is_paint_due = True
            self.call_later(self.paint)

    def paint(self) -> None:
        """Draw what is known now."""
        self._is_paint_due = False
        self._painted_at = self.clock()
        self._main.repaint()
        if isinstance(self.screen, DetailDialog | FleetDialog):
            self.screen.repaint()

    def _tick(self) -> None:
        """Ages of stale data and of a lost engine move without news."""
        if self.view.phase is not Phase.LIVE or self.view.is_stale(self.clock()):
            self.paint()

    # ---- subscriptions --------------------------------------------------------------------------------------

    def want(self, viewport: Viewport) -> None:
        """Have the engine on screen send `viewport` from now on."""
        self._wanted[self.current] = viewport
        self._subscribe(self.current)

    def _subscribe(self, target: str) -> None:
        wanted = self._wanted.get(target)
        if wanted is None or self._sent.get(target) == wanted or self.views[target].phase is not Phase.LIVE:
            return
        self._sent[target] = wanted
        self.start(self._send_subscription(target, wanted))

    async def _send_subscription(self, target: str, viewport: Viewport) -> None:
        reply = await self._link_to(target).request(Subscribe(interval_s=self.options.interval_s, viewport=viewport))
        if isinstance(reply, Refusal):
            self._sent.pop(target, None)
        elif target == self.current:
            self._main.ui = replace(self._main.ui, waiting_base=viewport.waiting_offset)

    async def _fetch_history(self, target: str) -> None:
        """Ask for the steps before this connection, so that plots start full."""
        if not self.views[target].can("DumpSteps"):
            return
        reply = await self._link_to(target).request(DumpSteps(count=HISTORY_STEPS))
        if isinstance(reply, Ack) and self.views[target].phase is Phase.LIVE:
            self.receive(Remembered(target, msgspec.convert(reply.data["steps"], list[StepRecord])))

    async def _fetch_audit(self, target: str, is_news: bool) -> None:
        """Keep the newest audit rows at hand; say so when somebody else changed a knob, or a change undid itself."""
        if not self.views[target].can("GetAudit"):
            return
        reply = await self._link_to(target).request(GetAudit(limit=AUDIT_ROWS_HELD))
        if not isinstance(reply, Ack):
            return
        rows = reply.data.get("rows", [])
        known = {row.get("id") for row in self.views[target].audit}
        self.receive(Audited(target, rows))
        if is_news and rows and rows[0].get("id") not in known and target == self.current:
            self._tell_news(rows[0])

    def _tell_news(self, row: Mapping[str, Any]) -> None:
        if row.get("change_id") not in self._main.operator.own_changes:
            self._main.report(Action("", Outcome.NEWS, f"{what(row)} @ step {row.get('step')}, by {who(row)}"))

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` beside the screen."""
        self.run_worker(work, exit_on_error=True)

    # ---- theme ----------------------------------------------------------------------------------------------

    def _palette(self, name: str) -> Palette:
        return self.options.palettes.get(name) or self.options.palettes[DEFAULT]

    def styles_for(self, is_stale: bool = False) -> StyleOf:
        """The function that gives a role its style; the same object as long as nothing changes."""
        return self._styles_in(self.palette, is_stale)

    def _styles_in(self, palette: Palette, is_stale: bool) -> StyleOf:
        known = self._style_functions.get((palette.name, is_stale))
        if known is None:

            def known(role: str) -> Style:
                return palette.style(role, is_stale)

            self._style_functions[palette.name, is_stale] = known
        return known

    def use_palette(self, name: str) -> StyleOf:
        """Switch themes at once; returns the new styles."""
        if self.options.has_colour:
            self.palette = self._palette(name)
            self.theme = f"schedtop-{self.palette.name}"
            self.paint()
        return self.styles_for()

    # ---- dialogs --------------------------------------------------------------------------------------------

    def ask(self, question: str, consequence: str, do: Callable[[], Awaitable[None]]) -> None:
        """Do something once confirmed."""

        async def carry_out() -> None:
            await do()

        def answered(yes: bool | None) -> None:
            if yes:
                self.start(carry_out())

        self.push_screen(ConfirmDialog(self.styles_for(), self.options.is_ascii, question, consequence), answered)

    def ask_to_start(self, name: str, plan: Sequence[str], start: Callable[[], None]) -> None:
        """Show what a playbook would do, and start it once confirmed."""

        def answered(yes: bool | None) -> None:
            if yes:
                start()

        self.push_screen(PlanDialog(self.styles_for(), self.options.is_ascii, name, plan), answered)

    def show_help(self, dead: set[str]) -> None:
        """All keys."""
        is_replay = self._main.ui.playback is not None
        self._open(HelpDialog(self.styles_for(), self.options.is_ascii, self.keymap, dead, is_replay))

    def _open(self, dialog: Dialog[None]) -> None:
        self.push_screen(dialog)

    def show_detail(self, request_id: str) -> None:
        """One request from close by."""
        self._open(DetailDialog(self.styles_for(), self.options.is_ascii, request_id, self._scene))

    def _scene(self) -> Scene:
        return self._main.scene()

    async def show_audit(self) -> None:
        """Who changed what, newest first."""
        reply = await self.link.request(GetAudit(limit=AUDIT_ROWS))
        if isinstance(reply, Ack):
            self._open(AuditDialog(self.styles_for(), self.options.is_ascii, reply.data.get("rows", [])))
        else:
            what = reply.message if isinstance(reply, Refusal) else "unexpected answer"
            self._main.report(Action("audit", Outcome.REFUSED, what))

    def show_commands(self) -> None:
        """The command registry: everything the key table can do, by name."""
        dead = self._main.dead_keys()
        choices = [
            Choice(key.id, key.label, key.help, key.id in dead) for key in self._main.keys if key.id != "commands"
        ]

        def chosen(key_id: str | None) -> None:
            if key_id in BY_ID:
                self.call_later(self._main.run_key, key_id)
            elif key_id is not None:
                self._main.stage(*key_id.split("=", 1))

        dialog = ChoiceDialog(self.styles_for(), self.options.is_ascii, "commands", choices, made_of=self._knob_choice)
        self.push_screen(dialog, chosen)

    def _knob_choice(self, typed: str) -> Choice | None:
        """`max_num_seqs 12` or `set policy=priority` as a command that stages the value."""
        words = typed.removeprefix("set ").replace("=", " ").split()
        names = [spec.name for spec in self.view.specs if words and spec.name.startswith(words[0])]
        if len(words) != 2 or not names or (len(names) > 1 and words[0] not in names):
            return None
        name = words[0] if words[0] in names else names[0]
        return Choice(f"{name}={words[1]}", f"{name}={words[1]}", "stage this value", self._main.ui.is_read_only)

    def show_themes(self) -> None:
        """Choose a theme, seeing each at once; Esc goes back to the one before."""
        before = self.palette.name
        choices = [Choice(name, palette.label) for name, palette in self.options.palettes.items()]

        def chosen(name: str | None) -> None:
            self.use_palette(name or before)

        dialog = ChoiceDialog(
            self.styles_for(), self.options.is_ascii, "theme", choices, selected=before, preview=self.use_palette
        )
        self.push_screen(dialog, chosen)

    def show_fleet(self) -> None:
        """All engines."""

        def chosen(target: str | None) -> None:
            if target is not None:
                self.drill_into(target)

        views = self.views
        self.push_screen(
            FleetDialog(self.styles_for(), self.options.is_ascii, lambda: list(views.values()), self.clock), chosen
        )

    def drill_into(self, target: str) -> None:
        """Put another engine on screen."""
        self._wanted[self.current] = FLEET_VIEWPORT
        self._subscribe(self.current)
        self.current = target
        welcome = self.view.welcome
        read_only = self.options.read_only or (welcome is not None and welcome.read_only)
        self._main.change(Ui(is_read_only=read_only))

    def save_picture(self) -> str:
        """Save the screen as SVG; returns what to tell the operator."""
        path = self.options.picture_folder / time.strftime("schedtop-%Y%m%d-%H%M%S.svg")
        try:
            path.write_text(self.export_screenshot(title="schedtop"), "utf-8")
        except OSError as fault:
            return f"not saved: {fault}"
        return f"saved {path}"


def _is_idle(event: LinkEvent, before: EngineView) -> bool:
    """Whether a snapshot says nothing but that time has passed since the one before."""
    if not isinstance(event, Received) or not isinstance(event.message, SnapshotUpdate) or before.snapshot is None:
        return False
    then, now = before.snapshot, event.message.snapshot
    is_idle = not (now.num_running or now.num_waiting or event.message.steps or event.message.peaks)
    return is_idle and msgspec.structs.replace(now, mono=then.mono, wall=then.wall) == then


def _is_audited(batch: EventBatch) -> bool:
    """Whether something in there has a row in the audit log that the screen shows."""
    kinds = (EventKind.KNOBS_CHANGED, EventKind.PAUSED, EventKind.UNPAUSED, EventKind.PRIORITY_CHANGED)
    return any(event.kind in kinds for event in batch.events)


def _textual_theme(palette: Palette) -> Theme:
    """What Textual needs to know of a palette: the colours behind the panels."""
    name = f"schedtop-{palette.name}"
    if palette.background == "ansi_default":
        return replace(BUILTIN_THEMES["ansi-dark"], name=name)
    return Theme(
        name=name,
        primary=palette.accent,
        foreground=palette.foreground,
        background=palette.background,
        surface=palette.background,
        panel=palette.background,
        dark=palette.is_dark,
    )
