"""The watching half of the main screen: paints scenes, turns keys and clicks into changes of `Ui`. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from textual import events
from textual.app import ComposeResult
from textual.screen import Screen

from schedtop.engine.snapshot import RequestRow, Viewport
from schedtop.tui import staging, table
from schedtop.tui.drawing import draw
from schedtop.tui.keys import BY_ID, Key, footer_key_at, keys_of
from schedtop.tui.keys import table as key_table
from schedtop.tui.layout import Place, Size, plan, size_class
from schedtop.tui.panels import FOCUSABLE
from schedtop.tui.plays import Play
from schedtop.tui.state import Action, Outcome, Scene, Ui
from schedtop.tui.table import HEAD_ROWS
from schedtop.tui.views import knobs as knob_view
from schedtop.tui.views import playbooks as playbook_view
from schedtop.tui.views.frame import Frame, inner_size
from schedtop.tui.views.kv import FIXED_ROWS
from schedtop.tui.views.requests import column_at, longest_id
from schedtop.tui.widgets.board import Board
from schedtop.tui.widgets.panel import Panel

if TYPE_CHECKING:
    from schedtop.tui.app import SchedtopApp

_DETAIL_CELLS = 600
"""Cells of the KV map wanted for the details of a request, where the map itself isn't on screen."""
_TYPED = frozenset("0123456789.")


class WatchScreen(Screen[None]):
    """One engine on screen. What the operator chose is in `ui`; what is known of the engine, in the app's view."""

    BINDINGS = []  # noqa: RUF012  (Textual's own way; the keys come from the key table)

    def __init__(self, ui: Ui, is_ascii: bool = False) -> None:
        super().__init__()
        self.ui = ui
        self.board = Board(is_ascii)
        self._frozen: Scene | None = None

    @property
    def owner(self) -> SchedtopApp:
        """The app, by its real type."""
        from schedtop.tui.app import SchedtopApp

        assert isinstance(self.app, SchedtopApp)
        return self.app

    def compose(self) -> ComposeResult:
        """Only the board: it makes the panels that its plan names."""
        yield self.board

    # ---- painting -------------------------------------------------------------------------------------------

    def scene(self) -> Scene:
        """What is to be drawn now; a frozen screen goes on showing its old view."""
        if self._frozen is not None:
            return replace(self._frozen, ui=self.ui)
        return Scene(self.owner.view, self.ui, self.owner.clock(), self._text(), self._plays())

    def _plays(self) -> Sequence[Play]:
        """Of the engine on screen; none where nothing can be steered."""
        return ()

    def _text(self) -> str:
        """Only for a request opened by hand: a tokenizer is loaded for it."""
        view = self.owner.view
        detail = view.snapshot.detail if view.snapshot is not None else None
        if self.ui.detail is None or detail is None or view.welcome is None:
            return ""
        return self.owner.reader.text(view.welcome.info, detail.output_token_ids)

    def repaint(self) -> None:
        """Draw the scene; panels refresh only what changed."""
        if not self.is_attached or not self.size:
            return
        scene = self.scene()
        self.board.arrange_by(plan(*self.size, self._main_panel(), self.ui.is_maximised))
        dead = self.dead_keys()
        for name, place in self.board.plan.items():
            styles = self.owner.styles_for(self._draws_engine(name) and scene.is_stale)
            self.board.panels[name].show(draw(name, scene, place, self.owner.keymap, dead), styles)
        self.owner.want(self._viewport())

    @staticmethod
    def _draws_engine(name: str) -> bool:
        return name not in ("identity", "alerts", "action", "keys", "tiny")

    def _main_panel(self) -> str:
        return self.ui.focus

    def _viewport(self) -> Viewport:
        places = self.board.plan
        cells = 0
        if place := places.get("kv"):
            width, height = inner_size(place.frame, place.width, place.height)
            cells = max(0, width * (height - FIXED_ROWS))
        height = places["requests"].height if "requests" in places else 16
        detail = self.ui.detail
        if detail is not None:
            cells = max(cells, _DETAIL_CELLS)
        if detail is None and "lifeline" in places and (row := self._selected()):
            detail = row.request_id
        return table.viewport(self.ui, height, cells, detail)

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys that mean something here."""
        return key_table(self.ui.playback is not None)

    def dead_keys(self) -> set[str]:
        """Ids of keys that can't act now."""
        view = self.owner.view
        return {key.id for key in self.keys if key.writes and (self.ui.is_read_only or not view.can(key.command))}

    def on_resize(self) -> None:
        """Lay out again."""
        self.repaint()

    def change(self, ui: Ui) -> None:
        """Take a new `ui` and show it."""
        self.ui = ui
        self.repaint()

    def report(self, action: Action) -> None:
        """Show the operator's last action."""
        self.change(replace(self.ui, action=action, is_action_read=False))

    # ---- input ----------------------------------------------------------------------------------------------

    async def on_key(self, event: events.Key) -> None:
        """Typing goes to the open entry; else the key table decides."""
        if self.ui.prompt is not None:
            self._type_filter(event)
        elif self.ui.focus == "knobs" and self._type_knob(event):
            pass
        else:
            key = next((key for key in self.keys if event.key in keys_of(key, self.owner.keymap)), None)
            if key is None:
                return
            await self.run_key(key.id)
        event.stop()
        event.prevent_default()

    async def run_key(self, key_id: str) -> None:
        """Run a key's action, or say why it can't act now."""
        key = BY_ID[key_id]
        self.ui = replace(self.ui, is_action_read=True)
        if key_id in self.dead_keys():
            why = "read-only" if self.ui.is_read_only else "this engine does not take it, or is not connected"
            self.report(Action(key.label, Outcome.REFUSED, why))
            return
        await self.run_action(key.action)

    def _type_filter(self, event: events.Key) -> None:
        typed = self.ui.prompt or ""
        if event.key == "enter":
            self.change(replace(self.ui, prompt=None))
            return
        if event.key in ("escape", "ctrl+c"):
            self._filter_by("", None)
            return
        if event.key == "backspace":
            typed = typed[:-1]
        elif event.character and event.is_printable:
            typed += event.character
        self._filter_by(typed, typed)

    def _filter_by(self, text: str, prompt: str | None) -> None:
        self.change(replace(self.ui, filter=text, prompt=prompt, running_offset=0, waiting_offset=0))

    def _type_knob(self, event: events.Key) -> bool:
        """In the knob panel digits are a value, never a panel; Esc leaves the panel."""
        spec = staging.current(self.ui, self.owner.view.specs)
        if self.ui.is_read_only or spec is None:
            return False
        if event.character and event.character in _TYPED:
            if spec.kind in ("int", "float"):
                self.change(replace(self.ui, entry=self.ui.entry + event.character))
            else:
                words = f"{spec.name} takes no number: + and - go through {staging.range_text(spec)}; Esc leaves"
                self.report(Action("", Outcome.REFUSED, words))
            return True
        if self.ui.entry and event.key == "backspace":
            self.change(replace(self.ui, entry=self.ui.entry[:-1]))
            return True
        return False

    def on_panel_clicked(self, message: Panel.Clicked) -> None:
        """A click focuses a panel and chooses what lies under it; the wheel scrolls."""
        message.stop()
        name = message.panel.name or ""
        if name == "requests":
            self._click_requests(message)
        elif name == "knobs":
            self._click_knobs(message)
        elif name == "keys":
            self._click_keys(message)
        elif name == "decisions" and message.wheel:
            self._scroll_log(message.wheel)
        elif name == "playbooks":
            self._click_playbooks(message)
        elif name in FOCUSABLE:
            self.change(replace(self.ui, focus=name))

    def _click_keys(self, message: Panel.Clicked) -> None:
        """A click on a key of the footer presses it."""
        key = footer_key_at(message.x, message.panel.size.width, self.owner.keymap, self.ui.playback is not None)
        if key is not None and not message.wheel:
            self.owner.start(self.run_key(key.id))

    def _click_knobs(self, message: Panel.Clicked) -> None:
        """A click chooses a knob, or stages the value under it on the slider; the wheel moves the cursor."""
        if message.wheel:
            self.change(replace(self.ui, focus="knobs"))
            self.action_move(message.wheel)
            return
        place = self.board.plan["knobs"]
        left, top = corner(place)
        width, height = inner_size(place.frame, place.width, place.height)
        found = knob_view.hit(self.scene(), width, height, message.x - left, message.y - top)
        self.ui = replace(self.ui, focus="knobs")
        if found.share is not None:
            self.stage_share(found.share)
        else:
            knob = self.ui.knob if found.knob is None else found.knob
            self.change(replace(self.ui, knob=knob, entry=self.ui.entry if knob == self.ui.knob else ""))

    def _click_playbooks(self, message: Panel.Clicked) -> None:
        """A click chooses a playbook, a second one is Enter; the wheel moves the cursor."""
        self.action_panel("playbooks")
        if message.wheel:
            self.action_move(message.wheel)
            return
        place = self.board.plan["playbooks"]
        width, height = inner_size(place.frame, place.width, place.height)
        chosen = playbook_view.hit(self.scene(), width, height, message.y - corner(place)[1])
        if chosen is not None:
            self.change(replace(self.ui, play=chosen))
            if message.is_double:
                self.owner.start(self.action_enter())

    def _click_requests(self, message: Panel.Clicked) -> None:
        snapshot, place = self.owner.view.snapshot, self.board.plan["requests"]
        if snapshot is None:
            return
        height = self._table_height()
        left, top = corner(place)
        line = message.y - HEAD_ROWS - top
        shown = table.windows(self.ui, snapshot, height)
        if message.wheel:
            is_waiting = shown.has_divider and line >= len(shown.running)
            self.change(table.scrolled(self.ui, snapshot, 3 * message.wheel, height, is_waiting))
            return
        if line == -HEAD_ROWS:
            self._click_header(message.x - left, inner_size(place.frame, place.width, place.height)[0])
            return
        rows = shown.lines()
        row = rows[line] if 0 <= line < len(rows) else None
        if isinstance(row, RequestRow):
            self.change(replace(self.ui, focus="requests", cursor=row.request_id))
            if message.is_double:
                self.owner.start(self.action_enter())

    def _click_header(self, x: int, width: int) -> None:
        """Sort by the column clicked; once more inverts."""
        snapshot = self.owner.view.snapshot
        column = column_at(x, width, longest_id(snapshot)) if snapshot is not None else None
        if column is None or column.field not in table.SORT_FIELDS or not column.field:
            return
        is_again = self.ui.sort == column.field
        is_descending = not self.ui.is_descending if is_again else False
        self.change(replace(self.ui, focus="requests", sort=column.field, is_descending=is_descending))

    # ---- moving and choosing --------------------------------------------------------------------------------

    def _selected(self) -> RequestRow | None:
        return table.selected(self.ui, self.owner.view.snapshot)

    def _chosen(self) -> list[RequestRow]:
        """The tagged requests that are in sight, or the selected one."""
        snapshot = self.owner.view.snapshot
        rows = [*snapshot.running, *snapshot.waiting] if snapshot else []
        tagged = [row for row in rows if row.request_id in self.ui.tags]
        row = self._selected()
        return tagged or ([row] if row else [])

    def _table_height(self) -> int:
        place = self.board.plan.get("requests")
        return inner_size(place.frame, place.width, place.height)[1] - HEAD_ROWS if place else 10

    def action_move(self, delta: int) -> None:
        """Move the cursor of the focused panel."""
        snapshot = self.owner.view.snapshot
        if self.ui.focus == "knobs":
            last = max(0, len(self.owner.view.specs) - 1)
            self.change(replace(self.ui, knob=max(0, min(last, self.ui.knob + delta)), entry=""))
        elif self.ui.focus == "decisions":
            self._scroll_log(delta)
        elif self.ui.focus == "playbooks":
            last = max(0, len(self._plays()) - 1)
            self.change(replace(self.ui, play=max(0, min(last, self.ui.play + delta))))
        elif snapshot is not None:
            self.change(table.moved(self.ui, snapshot, delta, self._table_height()))

    def _scroll_log(self, delta: int) -> None:
        snapshot = self.owner.view.snapshot
        most = len(snapshot.recent_preemptions) if snapshot else 0
        self.change(replace(self.ui, log_offset=max(0, min(most, self.ui.log_offset + delta))))

    def action_page(self, direction: int) -> None:
        """Move by a page."""
        self.action_move(direction * max(1, self._table_height() // 2))

    def action_filter(self) -> None:
        """Start typing a filter."""
        self.change(replace(self.ui, prompt=self.ui.filter, focus="requests"))

    def action_sort(self, delta: int) -> None:
        """Sort by the next column."""
        self.change(table.next_sort(self.ui, delta))

    def action_invert(self) -> None:
        """Invert the order."""
        self.change(replace(self.ui, is_descending=not self.ui.is_descending))

    def action_tag(self) -> None:
        """Tag or untag the selected request and go on; toggle the selected knob."""
        if self.ui.focus == "knobs":
            self.action_turn(1)
        elif row := self._selected():
            self.ui = replace(self.ui, tags=self.ui.tags ^ {row.request_id})
            self.action_move(1)

    def action_untag(self) -> None:
        """Forget all tags."""
        self.change(replace(self.ui, tags=frozenset()))

    def action_panel(self, name: str) -> None:
        """Focus a panel; where it isn't on screen, it takes the main place."""
        self.change(replace(self.ui, focus=name, entry=""))

    def action_cycle(self, delta: int) -> None:
        """Focus the next panel on screen."""
        is_compact = size_class(*self.size) is Size.COMPACT
        names = [name for name in FOCUSABLE if is_compact or name in self.board.plan] or [self.ui.focus]
        place = names.index(self.ui.focus) if self.ui.focus in names else 0
        self.action_panel(names[(place + delta) % len(names)])

    def action_maximise(self) -> None:
        """The focused panel alone, and back."""
        self.change(replace(self.ui, is_maximised=not self.ui.is_maximised))

    def action_freeze(self) -> None:
        """Hold the picture still, or let it go on."""
        self._frozen = None if self._frozen is not None else self.scene()
        self.change(replace(self.ui, is_frozen=self._frozen is not None))

    def action_back(self) -> None:
        """One step back; never quits."""
        ui = self.ui
        steps: tuple[tuple[bool, Callable[[], Ui]], ...] = (
            (bool(ui.entry), lambda: replace(ui, entry="")),
            (bool(ui.staged), lambda: replace(ui, staged={})),
            (ui.is_maximised, lambda: replace(ui, is_maximised=False)),
            (ui.detail is not None, lambda: replace(ui, detail=None)),
            (ui.focus != "requests", lambda: replace(ui, focus="requests")),
            (bool(ui.filter), lambda: replace(ui, filter="")),
            (bool(ui.tags), lambda: replace(ui, tags=frozenset())),
            (ui.is_frozen, lambda: ui),
        )
        if ui.is_frozen and not any(applies for applies, _ in steps[:-1]):
            self.action_freeze()
            return
        self.change(next((made() for applies, made in steps if applies), ui))

    # ---- what the acting half adds ----------------------------------------------------------------------------

    async def action_enter(self) -> None:
        """Do what Enter means in the focused panel."""
        raise NotImplementedError

    def action_turn(self, direction: int) -> None:
        """Stage the next value of the selected knob."""
        raise NotImplementedError

    def stage_share(self, share: float) -> None:
        """Stage the value at a place of the selected knob's slider."""
        raise NotImplementedError


def corner(place: Place) -> tuple[int, int]:
    """Columns and lines of a panel that its frame takes at the left and on top."""
    return (2, 1) if place.frame is Frame.BOX else (0, 1) if place.frame is Frame.RULE else (0, 0)
