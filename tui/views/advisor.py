"""The advisor's panel: one finding per line or two, with its evidence and what the key would stage. Pure."""

from schedtop.tui.advisor import Finding, find
from schedtop.tui.cells import Line, Span, clean, wrap
from schedtop.tui.format import value_text
from schedtop.tui.state import Scene
from schedtop.tui.views.frame import Body


def advisor(scene: Scene, width: int, height: int) -> Body:
    """The findings that fit; `a` stages the first that proposes a change."""
    findings = find(scene)
    if not findings:
        return Body([((_quiet(scene), "dim"),)])
    staged_by_key = next((finding for finding in findings if finding.changes), None)
    lines = [line for finding in findings for line in _lines(finding, finding is staged_by_key, width)]
    more = f"{len(findings)} findings" if len(findings) > 1 else "1 finding"
    return Body(lines, ((more, "warn"),))


def _quiet(scene: Scene) -> str:
    if scene.view.snapshot is None or scene.is_stale:
        return "no fresh data to judge"
    step = scene.view.snapshot.last_step
    return f"nothing to advise; last step limited by: {step.limited_by.value}" if step else "nothing to advise: idle"


def _lines(finding: Finding, is_first: bool, width: int) -> list[Line]:
    evidence = wrap(f"{finding.name}: {clean(finding.evidence)}", width)
    head = len(finding.name) + 1
    lines: list[Line] = [((evidence[0][:head], "warn"), (evidence[0][head:], "text"))]
    lines += [((rest, "text"),) for rest in evidence[1:]]
    changes = ", ".join(f"{name}={value_text(value)}" for name, value in finding.changes.items())
    advice: list[Span] = [("a ", "key")] if changes and is_first else []
    told = wrap(finding.advice, max(8, width - 4))
    advice += [("→ ", "dim"), (told[0], "text")]
    rest: list[Line] = [((f"  {more}", "text"),) for more in told[1:]]
    if changes:
        last = rest.pop() if rest else tuple(advice)
        staged = (*last, (": " + changes, "staged"))
        return [*lines, *([tuple(advice), *rest] if len(told) > 1 else []), staged]
    return [*lines, tuple(advice), *rest]
