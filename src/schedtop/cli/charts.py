"""Figures as text: a bar per point, curve by curve. What is drawn comes from `engine/sim/figures.py`."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from schedtop.engine.sim.figures import Figure

WIDTH = 44


def chart(figure: "Figure") -> list[str]:
    """Title, axes, and per curve one line per point; all curves share one scale."""
    largest = max((y for curve in figure.curves for _, y in curve.points), default=0.0)
    lines = [figure.title, f"{figure.x} -> {figure.y}"]
    for curve in figure.curves:
        lines.append(f"  {curve.label}")
        for x, y in curve.points:
            bar = "#" * round(WIDTH * y / largest) if largest else ""
            lines.append(f"  {x:>8g}  {y:>8.3g}  {bar}".rstrip())
    return lines
