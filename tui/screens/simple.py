"""Dialogs that show text or take one choice: help, yes or no, a list."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from textual import events

from schedtop.tui.cells import Line, clean, cut, fit, width_of, wrap
from schedtop.tui.keys import help_lines
from schedtop.tui.screens.dialog import Dialog
from schedtop.tui.views.audit import LONG_HEAD, long_row
from schedtop.tui.widgets.panel import StyleOf

LEGEND: Sequence[Line] = (
    (),
    (("How to read it", "title"),),
    (("  █ ", "prefill"), ("prefill   ", "text"), ("┃ ", "decode"), ("decode   ", "text"), ("▒ ", "draft"),
     ("draft   ", "text"), ("· ", "unused"), ("unused budget", "text")),
    (("  priority: the smaller number runs first (policy priority); F7 makes it smaller", "text"),),
    (("  ▓ ", "kv_used"), ("block in use  ", "text"), ("█ ", "kv_shared"), ("shared  ", "text"), ("░ ", "kv_cached"),
     ("cached, evictable  ", "text"), ("· ", "kv_free"), ("free  ", "text"),
     ("◆ ", "kv_mark"), ("the request's", "text")),
    (("  A staged value is a wish: only what the engine acknowledged is shown as its value.", "text"),),
)  # fmt: skip


_WHO_AND_WHY: Sequence[Line] = (
    (("What operators ask first", "title"),),
    (("  Who was preempted last, and for whom?", "strong"),),
    (("    the line `preempted` near the top; all of them: ", "text"), ("6", "key")),
    (("  Why does the first in the queue wait?", "strong"),),
    (("    the line `next` near the top; ", "text"), ("Enter", "key"), (" on a request tells more", "text")),
)
ANSWERS: Sequence[Line] = (
    *_WHO_AND_WHY,
    (("  What is the token budget, and how do I change it safely?", "strong"),),
    (("    `budget`: used/allowed tokens a step; the knob max_num_batched_tokens", "text"),),
    (("    ", "text"), ("5", "key"), (" then ", "text"), ("+ -", "key"),
     (" or a number: staged, not sent; range and forecast show", "text")),
    (("    ", "text"), ("c", "key"), (" applies it for 60 s: undone by itself unless ", "text"), ("K", "key"),
     (" keeps it; ", "text"), ("u", "key"), (" undoes", "text")),
    (),
)  # fmt: skip
ANSWERS_REPLAY: Sequence[Line] = (*_WHO_AND_WHY, ())


def hung(line: Line, width: int) -> list[Line]:
    """A line whose last span is broken, where it doesn't fit, to go on below its own beginning."""
    if width_of(line) <= width or len(line) < 2:
        return [line]
    indent = width_of(line[:-1])
    text, role = line[-1]
    first, *rest = wrap(text, max(8, width - indent)) or [""]
    return [(*line[:-1], (first, role)), *(((" " * indent, "text"), (more, role)) for more in rest)]


class HelpDialog(Dialog[None]):
    """All keys, from the key table."""

    heading = "keys"
    wanted_width = 100

    def __init__(
        self, styles: StyleOf, is_ascii: bool, keymap: Mapping[str, str], dead: Iterable[str], is_replay: bool = False
    ) -> None:
        super().__init__(styles, is_ascii)
        self._keymap = keymap
        self._is_replay = is_replay
        self._dead = set(dead)

    def body(self, width: int) -> list[Line]:
        """What is asked first, the key table in words, how to read the screen."""
        answers = ANSWERS_REPLAY if self._is_replay else ANSWERS
        keys = [part for line in help_lines(self._keymap, self._dead, self._is_replay) for part in hung(line, width)]
        return [*answers, *keys, *LEGEND]


class ConfirmDialog(Dialog[bool]):
    """Asks before something that can't be taken back. Only `y` says yes; Enter alone does nothing."""

    wanted_width = 60

    def __init__(self, styles: StyleOf, is_ascii: bool, question: str, consequence: str) -> None:
        super().__init__(styles, is_ascii)
        self.heading = "confirm"
        self._question = clean(question)
        self._consequence = consequence

    def body(self, width: int) -> list[Line]:
        """The question, what follows from it, the two keys."""
        lines: list[Line] = [((line, "strong"),) for line in wrap(self._question, width)]
        lines += [((line, "text"),) for line in wrap(self._consequence, width)]
        return [
            *lines,
            (),
            (("y", "key"), (" yes, do it    ", "text"), ("n", "key"), (" or ", "dim"), ("Esc", "key"), (" no", "text")),
        ]

    async def on_plain_key(self, event: events.Key) -> bool:
        """y or n."""
        if event.key in ("y", "Y"):
            self.dismiss(True)
        elif event.key in ("n", "N"):
            self.close_dialog()
        return event.key != "escape"


class PlanDialog(ConfirmDialog):
    """A playbook's dry run, line by line, before it is started."""

    wanted_width = 100

    def __init__(self, styles: StyleOf, is_ascii: bool, name: str, plan: Sequence[str]) -> None:
        super().__init__(styles, is_ascii, f"Start {name}? This is what it would do now:", "")
        self.heading = "dry run"
        self._plan = plan

    def body(self, width: int) -> list[Line]:
        """The question, the steps, the two keys."""
        question, *keys = super().body(width)
        steps: list[Line] = [
            ((line, "dim" if step.startswith(" ") else "text"),)
            for step in self._plan
            for line in wrap(clean(step), width)
        ]
        return [question, *steps, *keys]


@dataclass(frozen=True, slots=True)
class Choice:
    """One line of a list."""

    id: str
    label: str
    note: str = ""
    is_dead: bool = False


class ChoiceDialog(Dialog[str]):
    """A list to choose from. Answers the chosen id.

    With `made_of` typing narrows it, and what is typed may itself make a choice. `preview` gives the styles to draw in
    while a choice is marked.
    """

    def __init__(
        self,
        styles: StyleOf,
        is_ascii: bool,
        heading: str,
        choices: Sequence[Choice],
        selected: str = "",
        preview: Callable[[str], StyleOf] | None = None,
        made_of: Callable[[str], Choice | None] | None = None,
    ) -> None:
        super().__init__(styles, is_ascii)
        self.heading = heading
        self.typed = ""
        self._all = choices
        self._is_searchable = made_of is not None
        self._made_of = made_of
        self._preview = preview
        self._index = next((i for i, choice in enumerate(choices) if choice.id == selected), 0)

    @property
    def choices(self) -> list[Choice]:
        """Those that hold every typed word; names that begin with the first come first."""
        if self._made_of and (made := self._made_of(self.typed)):
            return [made]
        words = self.typed.lower().split()
        found = [c for c in self._all if all(word in f"{c.label} {c.note}".lower() for word in words)]
        return (
            sorted(found, key=lambda choice: not choice.label.lower().startswith(tuple(words[:1]))) if words else found
        )

    def body(self, width: int) -> list[Line]:
        """The search line, then the list with the chosen line marked."""
        lines: list[Line] = []
        if self._is_searchable:
            hint = "" if self.typed else "  type to search, Enter runs it"
            lines.append(((": ", "key"), (clean(self.typed) + "▏", "strong"), (hint, "dim")))
        label_width = max([len(choice.label) for choice in self._all], default=10) + 2
        for place, choice in enumerate(self.choices):
            role = "greyed" if choice.is_dead else "strong"
            line = fit([("  ", "text"), (cut(choice.label, label_width), role), (choice.note, "dim")], width)
            lines.append(tuple((text, f"{name}+cursor") for text, name in line) if place == self._index else line)
        return lines if self.choices else [*lines, (("nothing found", "dim"),)]

    async def on_plain_key(self, event: events.Key) -> bool:
        """Arrows choose, Enter answers, letters search."""
        if event.key in ("down", "up") or (not self._is_searchable and event.key in ("j", "k")):
            self._select(self._index + (1 if event.key in ("down", "j") else -1))
        elif event.key == "enter":
            self._answer()
        elif self._is_searchable and event.key == "backspace":
            self._search(self.typed[:-1])
        elif self._is_searchable and event.character and event.is_printable:
            self._search(self.typed + event.character)
        else:
            return False
        return True

    def _answer(self) -> None:
        choices = self.choices
        if choices and not choices[self._index].is_dead:
            self.dismiss(choices[self._index].id)

    def _search(self, text: str) -> None:
        self.typed = text
        self._select(0)

    def _select(self, index: int) -> None:
        choices = self.choices
        self._index = max(0, min(len(choices) - 1, index))
        head = 1 if self._is_searchable else 0
        if self._index + head >= self.offset_line + self.room:
            self.offset_line = self._index + head - self.room + 1
        self.offset_line = min(self.offset_line, self._index)
        if self._preview and choices:
            self.drawn_in = self._preview(choices[self._index].id)
        self.repaint()

    def on_line_clicked(self, line: int) -> None:
        """A click chooses and answers."""
        self._select(line - (1 if self._is_searchable else 0))
        self._answer()


class AuditDialog(Dialog[None]):
    """Rows of the audit log, newest first, as the engine's server wrote them."""

    heading = "audit"
    wanted_width = 140

    def __init__(self, styles: StyleOf, is_ascii: bool, rows: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(styles, is_ascii)
        self._rows = rows

    def body(self, width: int) -> list[Line]:
        """When, step, who, what, outcome, values and reason."""
        if not self._rows:
            return [(("nothing was changed since the log began", "dim"),)]
        return [fit([(LONG_HEAD, "header")], width, "header"), *(fit(long_row(row), width) for row in self._rows)]
