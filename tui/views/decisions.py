"""The decision log: who was preempted, for whom, and what it cost; the newest on top. Pure."""

from schedtop.engine.snapshot import Preemption
from schedtop.tui.cells import Line, Span, clean, cut_id, fit
from schedtop.tui.format import age, count, rate
from schedtop.tui.state import Scene, rates
from schedtop.tui.views.frame import Body
from schedtop.tui.views.overview import whom

_WITH_FREE = 64
"""Room from which the free blocks before and after are shown too."""


def decisions(scene: Scene, width: int, height: int) -> Body:
    """One line per preemption."""
    snapshot = scene.view.snapshot
    if snapshot is None:
        return Body([])
    newest_first = list(reversed(snapshot.recent_preemptions))
    offset = min(scene.ui.log_offset, max(0, len(newest_first) - height + 1))
    lines: list[Line] = [_header(width)] if newest_first else [(("no preemption since start", "dim"),)]
    lines += [_row(scene, preemption, width) for preemption in newest_first[offset : offset + height - 1]]
    totals, speed = snapshot.counters, rates(scene.view, scene.now)
    title: list[Span] = [
        (f"{count(totals.preemptions)} preemptions", "preempted" if totals.preemptions else "dim"),
        (f" · {count(totals.lost_tokens)} tokens lost", "text" if totals.lost_tokens else "dim"),
    ]
    if speed and speed.preemptions:
        title.append((f" · {rate(speed.preemptions)}/s", "preempted"))
    return Body(lines, tuple(title))


def _widths(width: int) -> int:
    fixed = 43 if width >= _WITH_FREE else 33
    return max(8, min(24, (width - fixed) // 2))


def _header(width: int) -> Line:
    ids = _widths(width)
    free = f" {'free':>9}" if width >= _WITH_FREE else ""
    text = f"{'step':>7} {'ago':>6} {'victim':<{ids}}   {'for':<{ids}} {'lost':>5} {'blk':>4}{free} {'nth':>3}"
    return fit([(text, "header")], width, "header")


def _row(scene: Scene, preemption: Preemption, width: int) -> Line:
    ids = _widths(width)
    cause = whom(preemption)
    free = f"{count(preemption.free_blocks_before)}→{count(preemption.free_blocks_after)}"
    ago = age(max(0.0, scene.engine_now - preemption.mono))
    return fit(
        [
            (f"{preemption.step:>7} ", "dim"),
            (f"{ago:>6} ", "dim"),
            (cut_id(clean(preemption.victim), ids), "preempted"),
            (" ← ", "dim"),
            (cut_id(cause, ids), "running"),
            (f" {count(preemption.num_lost_tokens):>5}", "strong"),
            (f" {count(preemption.num_blocks_freed):>4}", "text"),
            (f" {free:>9}" if width >= _WITH_FREE else "", "dim"),
            (f" {preemption.num_preemptions:>3}", "preempted" if preemption.num_preemptions > 1 else "text"),
        ],
        width,
    )
