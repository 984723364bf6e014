"""The advisor's panel: one finding per line or two, with its evidence and what the key would stage. Pure."""

from schedtop.tui.advisor import Finding, find
from schedtop.tui.cells import Line, Span, clean, fit
from schedtop.tui.format import value_text
from schedtop.tui.state import Scene
from schedtop.tui.views.frame import Body


def advisor(scene: Scene, width: int, height: int) -> Body:
    """The findings that fit; the first is the one that `a` stages."""
    findings = find(scene)
    if not findings:
        return Body([((_quiet(scene), "dim"),)])
    lines: list[Line] = []
    for place, finding in enumerate(findings):
        lines += [fit(line, width) for line in _lines(finding, place == 0, width)]
    more = f"{len(findings)} findings" if len(findings) > 1 else "1 finding"
    return Body(lines, ((more, "warn"),))


def _quiet(scene: Scene) -> str:
    if scene.view.snapshot is None or scene.is_stale:
        return "no fresh data to judge"
    step = scene.view.snapshot.last_step
    return f"nothing to advise; last step limited by: {step.limited_by.value}" if step else "nothing to advise: idle"


def _lines(finding: Finding, is_first: bool, width: int) -> list[Line]:
    changes = ", ".join(f"{name}={value_text(value)}" for name, value in finding.changes.items())
    advice: list[Span] = [("  → ", "dim"), (finding.advice, "text")]
    if changes:
        advice += [(f": {changes}", "staged")]
        advice += [("  a", "key"), (" stages it", "dim")] if is_first and not scene_is_narrow(width) else []
    return [((f"{finding.name}: ", "warn"), (clean(finding.evidence), "text")), tuple(advice)]


def scene_is_narrow(width: int) -> bool:
    """Whether the hint about the key must go."""
    return width < 44
