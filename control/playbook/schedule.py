"""The hours in which a playbook may run: `22:00-06:00`, `mon-fri 08:00-18:30`. Local wall clock, so no arithmetic
across daylight saving: a moment is inside or not.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from schedtop.control.playbook.expr import BadExpression

_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_FORM = re.compile(
    r"\s*(?:(?P<first>[a-z]{3})(?:-(?P<last>[a-z]{3}))?\s+)?(?P<open>\d{1,2}:\d\d)\s*-\s*(?P<close>\d{1,2}:\d\d)\s*"
)
MINUTES_A_DAY = 24 * 60


@dataclass(frozen=True, slots=True)
class Schedule:
    """A window of each of `days` (0 = Monday), in minutes after midnight; `close` at or before `open` is next day."""

    days: frozenset[int]
    open: int
    close: int
    zone: tzinfo | None = None
    """None: this machine's."""

    def is_open(self, wall: float) -> bool:
        """Whether a moment (`time.time()`) lies in a window. A window belongs to the day on which it opens."""
        moment = datetime.fromtimestamp(wall, UTC).astimezone(self.zone)
        minute, day = moment.hour * 60 + moment.minute, moment.weekday()
        if self.open < self.close:
            return day in self.days and self.open <= minute < self.close
        began_yesterday = minute < self.close and (day - 1) % 7 in self.days
        return began_yesterday or (minute >= self.open and day in self.days)


def parse_schedule(text: str, zone: str = "") -> Schedule:
    """Raises `BadExpression`."""
    match = _FORM.fullmatch(text.lower())
    if match is None:
        raise BadExpression(f"{text!r} is no schedule: write 22:00-06:00 or mon-fri 08:00-18:30")
    first = match["first"] or "mon"
    last = match["last"] or (match["first"] or "sun")
    for day in (first, last):
        if day not in _DAYS:
            raise BadExpression(f"{day!r} is no day: write {', '.join(_DAYS)}")
    start, num_days = _DAYS.index(first), (_DAYS.index(last) - _DAYS.index(first)) % 7 + 1
    opens, closes = _minute(match["open"]), _minute(match["close"])
    if opens == closes:
        raise BadExpression(f"{text!r} opens and closes at the same minute; leave the schedule out to run at any time")
    return Schedule(frozenset((start + n) % 7 for n in range(num_days)), opens, closes, parse_zone(zone))


def parse_zone(name: str) -> tzinfo | None:
    """`Europe/Berlin`; empty is this machine's zone. Raises `BadExpression`."""
    if not name:
        return None
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise BadExpression(f"there is no time zone {name!r}: write one such as Europe/Berlin or UTC") from None


def _minute(text: str) -> int:
    hours, minutes = map(int, text.split(":"))
    if minutes > 59 or hours * 60 + minutes > MINUTES_A_DAY:
        raise BadExpression(f"{text!r} is no time of day: 00:00 to 24:00")
    return hours * 60 + minutes
