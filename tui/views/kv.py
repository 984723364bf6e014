"""The KV pool: a bar, counts that add up, and a map in which a request's blocks light up. Pure."""

from schedtop.engine.snapshot import KvMap, PoolUsage
from schedtop.tui.cells import Line, Span, clean, join
from schedtop.tui.format import bar, count, percent
from schedtop.tui.state import Scene
from schedtop.tui.views.frame import Body
from schedtop.tui.views.overview import kv_counts

GLYPHS = {
    ".": ("·", "kv_free"), "c": ("░", "kv_cached"), "u": ("▓", "kv_used"),
    "s": ("█", "kv_shared"), "h": ("◇", "kv_held"), "p": ("○", "kv_pending"),
}  # fmt: skip
MARK = ("◆", "kv_mark")
FIXED_ROWS = 2
_WIDEST_CELL = 4


def kv(scene: Scene, width: int, height: int) -> Body:
    """Bar, legend with counts, map."""
    snapshot = scene.view.snapshot
    if snapshot is None:
        return Body([])
    pool = snapshot.pool
    parts = [(float(amount), glyph, role) for amount, glyph, role, _ in kv_counts(pool)]
    lines: list[Line] = [tuple(bar(parts, width))]
    lines += legend(pool, width)
    if snapshot.kv_map is not None:
        lines += kv_cells(snapshot.kv_map, width, height - len(lines))
    return Body(lines, _title(scene, pool))


def _title(scene: Scene, pool: PoolUsage) -> Line:
    snapshot = scene.view.snapshot
    spans: list[Span] = [(f"{percent(pool.in_use, pool.usable)} of {count(pool.usable)} blocks", "strong")]
    if snapshot is None or snapshot.kv_map is None:
        return tuple(spans)
    if snapshot.detail and snapshot.kv_map.marks:
        return ((f"◆ {clean(snapshot.detail.request_id)}", "kv_mark"), (" · ", "dim"), *spans)
    return (*spans, (f" · cell = {snapshot.kv_map.blocks_per_cell}", "dim"))


def legend(pool: PoolUsage, width: int) -> list[Line]:
    """Counts with glyph and word; those that are 0 and rare are left out when room is short."""
    items: list[tuple[Span, ...]] = []
    for amount, glyph, role, word in kv_counts(pool):
        if amount or word in ("used", "cached", "free"):
            items.append(((glyph, role), (f" {word} ", "dim"), (count(amount), "text")))
    lines: list[Line] = [join(items, "  ")]
    if sum(len(text) for text, _ in lines[0]) > width:
        half = (len(items) + 1) // 2
        lines = [join(items[:half], "  "), join(items[half:], "  ")]
    return lines


def kv_cells(kv_map: KvMap, width: int, rows: int) -> list[Line]:
    """The strip of cells folded into at most `rows` rows; a small pool gets wider cells; marks win."""
    if width <= 0:
        return []
    marks = set(kv_map.marks)
    drawn = [MARK if i in marks else GLYPHS.get(cell, ("?", "warn")) for i, cell in enumerate(kv_map.cells)]
    repeat = max(1, min(_WIDEST_CELL, width * rows // max(1, len(drawn))))
    per_row = max(1, width // repeat)
    return [_row(drawn[start : start + per_row], repeat) for start in range(0, len(drawn), per_row)][:rows]


def _row(cells: list[Span], repeat: int) -> Line:
    spans: list[Span] = []
    for glyph, role in cells:
        if spans and spans[-1][1] == role:
            spans[-1] = (spans[-1][0] + glyph * repeat, role)
        else:
            spans.append((glyph * repeat, role))
    return tuple(spans)
