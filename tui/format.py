"""Numbers, times and bars as text of fixed width. Pure; a number that isn't known is never drawn as 0."""

from collections.abc import Sequence

from schedtop.tui.cells import Line, Span

UNKNOWN = "–"
LEVELS = " ▁▂▃▄▅▆▇█"
FILL = {"prefill": "█", "decode": "┃", "draft": "▒", "unused": "·"}
"""What the parts of a budget are drawn with: told apart without colour."""
_RISING = {"decode": " ╻┃", "draft": " ░▒"}
"""A part's own glyphs for a cell that it fills in part; eighths of a block where there are none."""
_PARTS = " ▏▎▍▌▋▊▉"


def count(value: float) -> str:
    """A count in at most five cells.

    >>> [count(n) for n in (0, 999, 9999, 12345, 1234567, 98765432100)]
    ['0', '999', '9999', '12.3k', '1.23M', '98.8G']
    """
    if value < 10_000:
        return f"{value:.0f}"
    scales = ((1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T"))
    scale, unit = next((pair for pair in scales if value < pair[0] * 999.5), scales[-1])
    return f"{value / scale:.3g}{unit}"


def rate(value: float | None) -> str:
    """Something per second in at most five cells.

    >>> [rate(n) for n in (0, 0.04, 0.5, 12.34, 850.2)]
    ['0', '0.04', '0.5', '12.3', '850']
    """
    if value is None:
        return UNKNOWN
    if value and value < 0.1:
        return f"{value:.2f}"
    return f"{value:.1f}".removesuffix(".0") if value < 100 else count(value)


def duration(seconds: float | None) -> str:
    """A time span in at most seven cells, exact enough to tell 12 ms from 40 ms.

    >>> [duration(s) for s in (0.000012, 0.0123, 0.4, 3.21, 75, 7300, 200000)]
    ['0.01 ms', '12.3 ms', '400 ms', '3.21 s', '1m15s', '2h01m', '2d07h']
    >>> duration(None)
    '–'
    """
    if seconds is None:
        return UNKNOWN
    if seconds < 0.9995:
        millis = seconds * 1e3
        return f"{millis:.2f} ms" if millis < 9.995 else f"{millis:.1f} ms" if millis < 99.95 else f"{millis:.0f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes}m{int(seconds % 60):02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m" if minutes < 1440 else f"{minutes // 1440}d{minutes // 60 % 24:02d}h"


def age(seconds: float) -> str:
    """How old something is, coarse, so that it does not flicker.

    >>> [age(s) for s in (0.42, 3.21, 75, 4000)]
    ['0.4 s', '3.2 s', '1m15s', '1h06m']
    """
    return f"{max(0.0, seconds):.1f} s" if seconds < 60 else duration(seconds)


def percent(part: float, whole: float) -> str:
    """A share in at most four cells; of nothing there is none.

    >>> percent(1, 3), percent(5, 5), percent(0, 0), percent(1, 900)
    ('33%', '100%', '–', '<1%')
    """
    if not whole:
        return UNKNOWN
    share = 100 * part / whole
    return "<1%" if 0 < share < 0.5 else f"{share:.0f}%"


def value_text(value: object) -> str:
    """A knob's value as it is typed: on/off, numbers without trailing zeros.

    >>> value_text(True), value_text(0.05), value_text(2048), value_text("fcfs")
    ('on', '0.05', '2048', 'fcfs')
    """
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def bar(parts: Sequence[tuple[float, str, str]], width: int) -> list[Span]:
    """A bar of exactly `width` cells from (amount, glyph, role) parts; a part above 0 never vanishes.

    >>> bar([(1, "#", "a"), (0, "x", "b"), (1, ".", "c")], 4)
    [('##', 'a'), ('..', 'c')]
    """
    total = sum(amount for amount, _, _ in parts)
    if width <= 0 or total <= 0:
        return [(" " * max(0, width), "text")]
    sizes = [max(1, round(width * amount / total)) if amount > 0 else 0 for amount, _, _ in parts]
    while sum(sizes) != width:
        step = 1 if sum(sizes) < width else -1
        largest = max(range(len(sizes)), key=sizes.__getitem__)
        if sizes[largest] + step < 0:
            break
        sizes[largest] += step
    return [(glyph * size, role) for size, (_, glyph, role) in zip(sizes, parts, strict=True) if size]


def spark(values: Sequence[float | None], role: str, top: float | None = None) -> Line:
    """One row of columns; None is a gap, and 0 is drawn as nothing."""
    peak = top or max((value for value in values if value is not None), default=0.0)
    text = "".join(" " if value is None or peak <= 0 else _level(value / peak) for value in values)
    return ((text, role),)


def _level(share: float, levels: str = LEVELS) -> str:
    most = len(levels) - 1
    return levels[0] if share <= 0 else levels[min(most, max(1, round(share * most)))]


def stacked(columns: Sequence[Sequence[float]], roles: Sequence[str], height: int, top: float) -> list[list[Span]]:
    """Stacked columns as `height` rows, first row on top: `columns[x][i]` is drawn in `roles[i]`, from the ground up.

    A cell where layers meet is the one's that has most of it; each has glyphs of its own.

    >>> stacked([[4, 4], [1, 0]], ["decode", "prefill"], 2, 8)
    [[('█', 'prefill'), (' ', 'text')], [('┃╻', 'decode')]]
    """
    rows: list[list[Span]] = []
    for row in range(height - 1, -1, -1):
        spans: list[Span] = []
        for column in columns:
            text, role = _stacked_cell(column, roles, row * top / height, top / height)
            if spans and spans[-1][1] == role:
                spans[-1] = (spans[-1][0] + text, role)
            else:
                spans.append((text, role))
        rows.append(spans)
    return rows


def _stacked_cell(column: Sequence[float], roles: Sequence[str], floor: float, cell: float) -> Span:
    share = min(1.0, (sum(column) - floor) / cell)
    if share <= 0.06:
        return " ", "text"
    reach, shares = 0.0, []
    for amount in column:
        low, reach = reach, reach + amount
        shares.append(min(reach, floor + cell) - max(low, floor))
    role = roles[max(range(len(shares)), key=shares.__getitem__)]
    return (FILL[role] if share >= 1 else _level(share, _RISING.get(role, LEVELS))), role
