"""The playbook panel: what there is, what runs from here, and of the selected one its steps and checks, live. Pure."""

from schedtop.tui.cells import Line, Span, clean, cut, fit, wrap
from schedtop.tui.plays import Play
from schedtop.tui.state import Scene
from schedtop.tui.views.frame import Body

_GLYPHS = {
    "to come": "·",
    "now": "▶",
    "done": "✓",
    "skipped": "-",
    "pass": "✓",
    "fail": "✗",
    "error": "✗",
    "no data": "?",
}
_ROLES = {"now": "strong", "done": "good", "pass": "good", "fail": "bad", "error": "bad", "no data": "warn"}
_NAME = 24


def playbooks(scene: Scene, width: int, height: int) -> Body:
    """One line each, the selected one in full below."""
    plays = scene.plays
    if not plays:
        why = "a recording can't be steered" if scene.ui.playback is not None else "reading ..."
        return Body([((why, "dim"),)])
    chosen = min(scene.ui.play, len(plays) - 1)
    detail = _detail(plays[chosen], width)
    listed = _listed(scene, width, height)
    shown = [_line(plays[place], place == chosen, scene.ui.focus == "playbooks", width) for place in listed]
    running = sum(play.is_running for play in plays)
    title: Line = ((f"{running} running", "good"),) if running else (("Enter tries one dry", "dim"),)
    return Body([*shown, *detail[: height - len(shown)]], title)


def hit(scene: Scene, width: int, height: int, line: int) -> int | None:
    """The place of the playbook on a line of the panel; None: none is there."""
    listed = _listed(scene, width, height) if scene.plays else range(0)
    return listed[line] if 0 <= line < len(listed) else None


def _listed(scene: Scene, width: int, height: int) -> range:
    """Places of the playbooks that are listed: around the selected one, what its details leave room for."""
    chosen = min(scene.ui.play, len(scene.plays) - 1)
    room = max(1, height - min(len(_detail(scene.plays[chosen], width)), height // 2))
    first = max(0, min(chosen - room // 2, len(scene.plays) - room))
    return range(first, min(first + room, len(scene.plays)))


def _line(play: Play, is_chosen: bool, has_focus: bool, width: int) -> Line:
    words, role = _state(play)
    mark: Span = ("▶ ", "key") if is_chosen and has_focus else ("· " if is_chosen else "  ", "dim")
    name: Span = (cut(clean(play.name), _NAME).ljust(_NAME) + " ", "strong" if is_chosen else "text")
    return fit((mark, name, (clean(words), role)), width)


def _state(play: Play) -> tuple[str, str]:
    """How it stands in a few words, and the role they are drawn in."""
    if play.fault:
        return f"can't be used: {play.fault}", "bad"
    if not play.is_running or play.progress is None:
        return (play.ending, "dim") if play.ending else (play.description, "dim")
    progress = play.progress
    if progress.phase == "steps":
        number = next((i for i, line in enumerate(progress.steps, 1) if line.state == "now"), len(progress.steps))
        return f"step {number} of {len(progress.steps)}: {progress.doing.strip()}", "good"
    if progress.phase == "ended":
        return "rests until its moment comes again", "good"
    return progress.doing.strip() or "begins", "good"


def _detail(play: Play, width: int) -> list[Line]:
    """What it is for; once it has run, its steps and checks with what was measured."""
    lines: list[Line] = [()]
    if play.progress is None:
        return [*lines, *(((line, "dim"),) for line in wrap(clean(play.fault or play.description), width))]
    progress = play.progress
    rows = [*progress.steps, *progress.checks, *progress.last]
    heads = [""] * len(progress.steps) + ["expect "] * len(progress.checks) + ["finally "] * len(progress.last)
    for head, row in zip(heads, rows, strict=True):
        spans: list[Span] = [
            (f"{_GLYPHS.get(row.state, '·')} ", _ROLES.get(row.state, "dim")),
            (clean(head + row.what), "text"),
            (f"  {clean(row.detail)}" if row.detail else "", "dim"),
        ]
        lines.append(fit(spans, width))
    if play.ending and not play.is_running:
        lines += [((line, "strong"),) for line in wrap(clean(play.ending), width)]
    return lines
