"""Where each panel goes for a screen of given size. Pure: nothing overlaps, nothing hangs over."""

from dataclasses import dataclass
from enum import StrEnum

from schedtop.tui.views.frame import Frame

MIN_WIDTH, MIN_HEIGHT = 40, 10
STRIPS_TOP = ("identity", "alerts")
STRIPS_BOTTOM = ("action", "keys")
COMPACT_STRIPS = ("budget_line", "sequences_line", "next_line", "preempted_line", "kv_line", "latency_line")


class Size(StrEnum):
    """The layouts."""

    TINY = "tiny"
    COMPACT = "compact"
    MEDIUM = "medium"
    LARGE = "large"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one panel goes, in cells."""

    x: int
    y: int
    width: int
    height: int
    frame: Frame = Frame.NONE


Plan = dict[str, Place]


def size_class(width: int, height: int) -> Size:
    """Which layout a screen gets."""
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return Size.TINY
    if width >= 180 and height >= 46:
        return Size.LARGE
    return Size.MEDIUM if width >= 110 and height >= 34 else Size.COMPACT


def plan(width: int, height: int, focus: str = "requests", is_maximised: bool = False) -> Plan:
    """The place of every panel that is shown."""
    size = size_class(width, height)
    if size is Size.TINY:
        return {"tiny": Place(0, 0, width, height)}
    places = _strips(width, height)
    top, room = len(STRIPS_TOP), height - len(STRIPS_TOP) - len(STRIPS_BOTTOM)
    if is_maximised:
        frame = Frame.RULE if size is Size.COMPACT else Frame.BOX
        return places | {focus: Place(0, top, width, room, frame)}
    if size is Size.COMPACT:
        return places | _compact(width, top, room, focus)
    panels = _medium(width, top, room) if size is Size.MEDIUM else _large(width, top, room)
    if focus not in panels:  # it has no place of its own here: it takes the main one while it has the focus
        panels[focus] = panels.pop("requests")
    return places | panels


def _strips(width: int, height: int) -> Plan:
    places = {name: Place(0, y, width, 1) for y, name in enumerate(STRIPS_TOP)}
    first = height - len(STRIPS_BOTTOM)
    return places | {name: Place(0, first + i, width, 1) for i, name in enumerate(STRIPS_BOTTOM)}


def _compact(width: int, top: int, room: int, focus: str) -> Plan:
    shown = COMPACT_STRIPS[: max(0, min(len(COMPACT_STRIPS), room - 4))]
    places = {name: Place(0, top + i, width, 1) for i, name in enumerate(shown)}
    y, left = top + len(shown), room - len(shown)
    if left < 26:
        return places | {focus: Place(0, y, width, left, Frame.RULE)}
    second = "knobs" if focus == "requests" else focus
    lower = left // 2 if second != "decisions" else left // 3
    return places | {
        "requests": Place(0, y, width, left - lower, Frame.RULE),
        second: Place(0, y + left - lower, width, lower, Frame.RULE),
    }


def _stack(x: int, y: int, width: int, heights: dict[str, int]) -> Plan:
    places: Plan = {}
    for name, height in heights.items():
        places[name] = Place(x, y, width, height, Frame.BOX)
        y += height
    return places


def _strips_above(width: int, top: int) -> Plan:
    """Who runs and waits; below, who is next and who was preempted last."""
    half = width * 11 // 20
    return {
        "sequences_line": Place(0, top, width, 1),
        "next_line": Place(0, top + 1, half, 1),
        "preempted_line": Place(half, top + 1, width - half, 1),
    }


def _medium(width: int, top: int, room: int) -> Plan:
    """Row A budget and KV map, row B requests beside latency and knobs, row C decisions and advisor."""
    right = max(52, width * 2 // 5)
    left = width - right
    upper = max(9, room // 4)
    lower = max(7, room // 5)
    middle = room - upper - lower
    strips = _strips_above(width, top)
    top, middle = top + 2, middle - 2
    return (
        strips
        | _stack(0, top, left, {"budget": upper, "requests": middle, "decisions": lower})
        | _stack(left, top, right, {"kv": upper, "latency": 8, "knobs": room - 2 - upper - 8 - 6, "advisor": 6})
    )


def _large(width: int, top: int, room: int) -> Plan:
    """Three columns: budget, requests, decisions; KV, time axis, lifeline; latency, knobs, audit, advisor."""
    left, right = width * 43 // 100, width * 27 // 100
    centre = width - left - right
    strips = _strips_above(width, top)
    top, room = top + 2, room - 2
    budget, decisions, kv, lifeline = 13, max(9, room // 5), 13, max(12, room // 4)
    audit, advisor = 9, max(9, room // 5)
    return (
        strips
        | _stack(0, top, left, {
            "budget": budget, "requests": room - budget - decisions, "decisions": decisions})
        | _stack(left, top, centre, {"kv": kv, "timeline": room - kv - lifeline, "lifeline": lifeline})
        | _stack(left + centre, top, right, {
            "latency": 8, "knobs": room - 8 - audit - advisor, "audit": audit, "advisor": advisor})
    )  # fmt: skip
