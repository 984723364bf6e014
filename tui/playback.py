"""Where a replay stands, how fast it goes, and where a typed place lies. Pure: no file, no clock, no widget."""

import re
import time
from dataclasses import dataclass

from schedtop.engine.errors import SchedtopError
from schedtop.tui.cells import Line, Span, between, clean, fit
from schedtop.tui.format import age

SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
LONGEST_GAP_S = 2.0
"""No pause in a recording is played longer than this."""
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")
_SPAN = re.compile(r"([+-]?)(\d+(?:\.\d+)?)(s|m|min|h|%)")
_SECONDS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


class BadPlace(SchedtopError):
    """A typed place that can't be read."""

    code = "bad_place"


@dataclass(frozen=True, slots=True)
class Playback:
    """What the REPLAY bar shows. Times are wall times in seconds."""

    place: int = 0
    total: int = 1
    is_playing: bool = False
    speed: float = 1.0
    wall: float = 0.0
    first_wall: float = 0.0
    last_wall: float = 0.0
    step: int = -1
    prompt: str = ""
    """What is asked for while it is being typed: "seek" or "search"."""
    typed: str = ""
    sought: str = ""
    """The last text searched for."""
    note: str = ""

    @property
    def share(self) -> float:
        """How far into the recording, 0 to 1, by time."""
        length = self.last_wall - self.first_wall
        return (self.wall - self.first_wall) / length if length > 0 else 1.0


def faster(speed: float, direction: int) -> float:
    """The next speed up (+1) or down (-1).

    >>> faster(1.0, 1), faster(0.25, -1)
    (2.0, 0.25)
    """
    place = SPEEDS.index(speed) + direction
    return SPEEDS[max(0, min(len(SPEEDS) - 1, place))]


def time_meant(text: str, playback: Playback) -> float:
    """The wall time that was typed: `12:03[:04]`, `90s` or `2m` from the start, `+10s`, `-10s`, `50%`.

    Raises `BadPlace`. A number alone is a step, and not for this function.
    """
    word = text.strip().lower()
    if clock := _CLOCK.fullmatch(word):
        return _clock_time(clock, playback)
    if span := _SPAN.fullmatch(word):
        sign, number, unit = span.groups()
        if unit == "%" and not sign:
            return playback.first_wall + (playback.last_wall - playback.first_wall) * float(number) / 100
        if unit != "%":
            start = {"": playback.first_wall, "+": playback.wall, "-": playback.wall}[sign]
            return start + float(f"{sign}{number}") * _SECONDS[unit]
    raise BadPlace(f"{text!r} is no place: type a step, 12:03:04, 90s (from the start), +10s, -10s or 50%")


def _clock_time(clock: "re.Match[str]", playback: Playback) -> float:
    hours, minutes, seconds = (int(part or 0) for part in clock.groups())
    if hours > 23 or minutes > 59 or seconds > 59:
        raise BadPlace(f"{clock.string!r} is no time of day")
    day = time.localtime(playback.first_wall)
    meant = time.mktime((day.tm_year, day.tm_mon, day.tm_mday, hours, minutes, seconds, 0, 0, -1))
    return meant if meant >= playback.first_wall - 1 else meant + 86_400


def replay_bar(playback: Playback, width: int) -> Line:
    """The line that says that this is no live engine: where it stands, or what is being typed."""
    if playback.prompt:
        hint = "a step, 12:03:04, 90s, +10s, 50%" if playback.prompt == "seek" else "a request or an event"
        spans: list[Span] = [(f"{playback.prompt}: ", "key"), (clean(playback.typed) + "▏", "strong")]
        return fit([*spans, (f"   {hint}; Enter goes there, Esc leaves", "dim")], width)
    glyph = "▶" if playback.is_playing else "⏸"
    left: list[Span] = [
        (f"REPLAY {glyph} {playback.speed:g}x ", "warn"),
        (time.strftime("%H:%M:%S", time.localtime(playback.wall)), "strong"),
        (f" {age(playback.wall - playback.first_wall)} of {age(playback.last_wall - playback.first_wall)}", "text"),
        (f"  frame {playback.place + 1}/{playback.total} ", "dim"),
    ]
    if playback.note:
        return fit([*left, (clean(playback.note), "strong")], width)
    room = max(0, width - sum(len(text) for text, _ in left) - 1)
    done = round(room * playback.share)
    return between(left, [("━" * done, "focus"), ("─" * (room - done), "dim")], width)
