"""Every key once: bindings, help and footer are made from this table. Nothing here runs an action."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from schedtop.tui.cells import Line, Span
from schedtop.tui.panels import PANELS


@dataclass(frozen=True, slots=True)
class Key:
    """One action and its keys. `id` is what a config file remaps; `action` is a method of the app."""

    id: str
    keys: str
    action: str
    label: str
    help: str
    group: str
    writes: bool = False
    """Changes the engine: greyed and dead in read-only mode."""
    footer: int = 0
    """Place in the footer, small first; 0 = not there."""
    command: str = ""
    """The command of the control protocol it needs."""


SCREEN, MOVE, ACT, KNOBS, VIEW = "The screen", "Moving and choosing", "Acting on requests", "Knobs and engine", "View"

_PANEL_KEYS = tuple(
    Key(f"panel_{spec.key}", spec.key, f"panel('{name}')", spec.label, spec.help, VIEW, footer=spec.footer)
    for name, spec in PANELS.items()
    if spec.key
)

KEYS: tuple[Key, ...] = (
    Key("help", "question_mark,f1", "help", "help", "this help", SCREEN, footer=1),
    Key("quit", "q,ctrl+c", "quit", "quit", "leave schedtop (the engine goes on)", SCREEN, footer=99),
    Key("back", "escape", "back", "back", "one step back (entry, staging, maximised, filter); never quits", SCREEN),
    Key("commands", "colon,ctrl+p", "commands", "commands", "every command by name, with search", SCREEN, footer=9),
    Key("themes", "f2", "themes", "theme", "choose a theme", SCREEN),
    Key("freeze", "p", "freeze", "pause screen", "hold the picture still; the engine goes on", SCREEN),
    Key("screenshot", "f12", "screenshot", "screenshot", "save the screen as an SVG picture", SCREEN),
    Key("down", "j,down", "move(1)", "down", "next row", MOVE),
    Key("up", "k,up", "move(-1)", "up", "previous row", MOVE),
    Key("page_down", "pagedown,ctrl+f", "page(1)", "page down", "a page down", MOVE),
    Key("page_up", "pageup,ctrl+b", "page(-1)", "page up", "a page up", MOVE),
    Key("top", "g,home", "move(-1000000)", "top", "first row", MOVE),
    Key("bottom", "G,end", "move(1000000)", "bottom", "last row", MOVE),
    Key("filter", "slash", "filter", "filter", "show requests whose id contains a text; !text inverts", MOVE, footer=3),
    Key("sort_left", "less_than_sign", "sort(-1)", "sort", "sort by the previous column", MOVE),
    Key("sort_right", "greater_than_sign", "sort(1)", "sort", "sort by the next column", MOVE),
    Key("invert", "I", "invert", "invert", "invert the sort order", MOVE),
    Key("tag", "space", "tag", "tag", "tag the selected request; in the knob panel, toggle", MOVE, footer=5),
    Key("untag", "U", "untag", "untag all", "forget all tags", MOVE),
    Key("enter", "enter", "enter", "details", "details of the request; in the knob panel, apply", MOVE, footer=2),
    Key("priority_up", "f7,right_square_bracket", "priority(-1)", "sooner",
        "smaller priority number (runs sooner) for the selected or tagged requests", ACT, writes=True,
        footer=6, command="SetPriority"),
    Key("priority_down", "f8,left_square_bracket", "priority(1)", "later",
        "larger priority number (runs later) for the selected or tagged requests", ACT, writes=True,
        command="SetPriority"),
    Key("abort", "x", "abort", "abort", "abort the selected or tagged requests; asks first", ACT, writes=True,
        footer=7, command="AbortRequests"),
    Key("hold", "H", "hold", "hold", "hold the selected or tagged requests back (or release them); asks first", ACT,
        writes=True, command="HoldRequests"),
    Key("knob_up", "plus,equals_sign", "turn(1)", "more", "stage a larger value for the knob", KNOBS, writes=True,
        command="SetKnobs"),
    Key("knob_down", "minus", "turn(-1)", "less", "stage a smaller value for the selected knob", KNOBS, writes=True,
        command="SetKnobs"),
    Key("slide_right", "right", "slide(1)", "slide up", "move the selected knob's slider to the right", KNOBS,
        writes=True, command="SetKnobs"),
    Key("slide_left", "left", "slide(-1)", "slide down", "move the selected knob's slider to the left", KNOBS,
        writes=True, command="SetKnobs"),
    Key("confirmed", "c", "apply_confirmed", "for 60 s",
        "apply the staged values for 60 s: undone by themselves unless kept", KNOBS, writes=True, command="SetKnobs"),
    Key("keep", "K", "keep", "keep", "keep a change that would be undone by itself", KNOBS, writes=True,
        command="ConfirmChange"),
    Key("undo", "u", "undo", "undo", "roll the last knob change back", KNOBS, writes=True, footer=8,
        command="UndoChange"),
    Key("advise", "a", "advise", "stage advice", "stage what the advisor proposes first", KNOBS, writes=True,
        command="SetKnobs"),
    Key("preempt", "", "preempt", "preempt", "throw the selected or tagged requests back to the queue; asks first", ACT,
        writes=True, command="PreemptRequests"),
    Key("drain", "", "drain", "drain", "admit nobody new, let the rest end; asks first", KNOBS, writes=True,
        command="Drain"),
    Key("reset_cache", "", "reset_cache", "reset cache", "forget cached prefixes that nobody uses; asks first", KNOBS,
        writes=True, command="ResetPrefixCache"),
    Key("self_check", "", "self_check", "self-check", "prove block and reference accounting on the live engine", KNOBS,
        writes=True, command="SelfCheck"),
    Key("pause", "P", "pause_engine", "pause engine", "pause or resume the engine; asks first", KNOBS, writes=True,
        command="Pause"),
    *_PANEL_KEYS,
    Key("next_panel", "tab", "cycle(1)", "next panel", "focus the next panel", VIEW),
    Key("previous_panel", "shift+tab", "cycle(-1)", "previous panel", "focus the previous panel", VIEW),
    Key("maximise", "z", "maximise", "maximise", "give the focused panel the whole screen, and back", VIEW),
    Key("audit", "A", "audit", "audit", "who changed what, when, why, and how it ended", VIEW),
    Key("fleet", "F", "fleet", "fleet", "all engines, one row each; Enter drills in", VIEW),
)  # fmt: skip

REPLAY = "Replay"

REPLAY_KEYS: tuple[Key, ...] = (
    Key("play", "p,enter", "play", "play", "play, or stand still", REPLAY, footer=2),
    Key("step_forward", "right_square_bracket,right", "step(1)", "step", "the next frame", REPLAY, footer=4),
    Key("step_back", "left_square_bracket,left", "step(-1)", "back", "the frame before", REPLAY, footer=3),
    Key("leap_forward", "right_curly_bracket,shift+right", "step(10)", "leap", "ten frames on", REPLAY),
    Key("leap_back", "left_curly_bracket,shift+left", "step(-10)", "leap back", "ten frames back", REPLAY),
    Key("first_frame", "0", "ends(0)", "first frame", "to the start of the recording", REPLAY),
    Key("last_frame", "9", "ends(1)", "last frame", "to the end of the recording", REPLAY),
    Key("seek", "S", "ask_place", "seek", "go to a step, a time of day, 90s, +10s, 50%", REPLAY, footer=5),
    Key("search", "s", "ask_text", "search", "go to where a request or an event is named", REPLAY, footer=6),
    Key("next_hit", "n", "find(1)", "next hit", "the next frame that names it", REPLAY, footer=7),
    Key("previous_hit", "N", "find(-1)", "previous hit", "the frame before that names it", REPLAY),
    Key("play_faster", "plus,equals_sign", "speed(1)", "faster", "play faster", REPLAY),
    Key("play_slower", "minus", "speed(-1)", "slower", "play slower", REPLAY),
    Key("open", "d", "enter", "details", "details of the selected request", REPLAY, footer=8),
)
"""Only in a replay; there they go before the rest, of which nothing that needs an engine is left."""

_NOT_IN_REPLAY = frozenset({"enter", "freeze", "audit", "fleet", "panel_9"})
BY_ID: Mapping[str, Key] = {key.id: key for key in (*KEYS, *REPLAY_KEYS)}


@cache
def table(is_replay: bool) -> tuple[Key, ...]:
    """The keys of a live screen or of a replay."""
    if not is_replay:
        return KEYS
    return REPLAY_KEYS + tuple(key for key in KEYS if not key.writes and key.id not in _NOT_IN_REPLAY)


_NAMES = {
    "question_mark": "?", "colon": ":", "slash": "/", "less_than_sign": "<", "greater_than_sign": ">", "plus": "+",
    "equals_sign": "=", "minus": "-", "right_square_bracket": "]", "left_square_bracket": "[", "escape": "Esc",
    "right_curly_bracket": "}", "left_curly_bracket": "{", "right": "→", "left": "←",
    "space": "Space", "enter": "Enter", "tab": "Tab", "pagedown": "PgDn", "pageup": "PgUp", "home": "Home",
    "end": "End", "down": "↓", "up": "↑",
}  # fmt: skip


def key_name(key: str) -> str:
    """A key as people write it.

    >>> key_name("question_mark"), key_name("ctrl+p"), key_name("f1"), key_name("G")
    ('?', 'Ctrl-p', 'F1', 'G')
    """
    if key in _NAMES:
        return _NAMES[key]
    if "+" in key:
        modifier, rest = key.split("+", 1)
        return f"{modifier.title()}-{key_name(rest)}"
    return key.upper() if key[:1] == "f" and key[1:].isdigit() else key


def keys_of(key: Key, keymap: Mapping[str, str]) -> list[str]:
    """The keys that run `key` now: the operator's own, or the table's; none for what only the registry offers."""
    return [name for name in keymap.get(key.id, key.keys).split(",") if name]


def in_footer(width: int, keymap: Mapping[str, str], is_replay: bool = False) -> list[tuple[Key, str]]:
    """The most useful keys that fit into one line, with their names."""
    shown: list[tuple[Key, str]] = []
    used = 0
    for key in sorted((key for key in table(is_replay) if key.footer), key=lambda key: key.footer):
        name = key_name(keys_of(key, keymap)[0])
        if used + (size := _footer_size(key, name)) <= width:
            used += size
            shown.append((key, name))
    return shown


def _footer_size(key: Key, name: str) -> int:
    return len(name) + len(key.label) + 3


def footer(width: int, keymap: Mapping[str, str], dead: Iterable[str] = (), is_replay: bool = False) -> Line:
    """The most useful keys in one line; those that can't act now are greyed."""
    spans: list[Span] = []
    greyed = set(dead)
    for key, name in in_footer(width, keymap, is_replay):
        spans.append((name, "greyed" if key.id in greyed else "key"))
        spans.append((f" {key.label}  ", "greyed" if key.id in greyed else "dim"))
    return tuple(spans)


def footer_key_at(x: int, width: int, keymap: Mapping[str, str], is_replay: bool = False) -> Key | None:
    """The key of the footer that lies under column `x`."""
    edge = 0
    for key, name in in_footer(width, keymap, is_replay):
        edge += _footer_size(key, name)
        if x < edge:
            return key
    return None


def help_lines(keymap: Mapping[str, str], dead: Iterable[str] = (), is_replay: bool = False) -> list[Line]:
    """All keys by group."""
    greyed = set(dead)
    lines: list[Line] = []
    keys = table(is_replay)
    for group in dict.fromkeys(key.group for key in keys):
        lines += [(), ((group, "title"),)] if lines else [((group, "title"),)]
        for key in keys:
            if key.group == group:
                names = "  ".join(key_name(name) for name in keys_of(key, keymap)) or "(through :)"
                is_dead = key.id in greyed
                note = " (off now)" if is_dead else ""
                lines.append(
                    (
                        (f"  {names:<16}", "greyed" if is_dead else "key"),
                        (key.help + note, "dim" if is_dead else "text"),
                    )
                )
    return lines
