"""The audit log: who changed what, when, and how it ended; the newest on top. Pure."""

import time
from collections.abc import Mapping
from typing import Any

from schedtop.tui.cells import Line, Span, clean, cut, fit
from schedtop.tui.format import value_text
from schedtop.tui.state import Scene
from schedtop.tui.views.frame import Body

_ROLES = {"done": "good", "refused": "bad", "failed": "bad", "rolled back": "knob"}
_GLYPHS = {"done": "✓", "refused": "✗", "failed": "✗", "rolled back": "⟳"}
_WHO = 12


def audit(scene: Scene, width: int, height: int) -> Body:
    """The newest rows that fit: time of day, how it ended, who, what."""
    rows = scene.view.audit
    if not rows:
        return Body([(("nobody changed anything since the log began", "dim"),)])
    return Body([fit(_short_row(row), width) for row in rows[:height]], (("A", "key"), (" shows all of it", "dim")))


def _short_row(row: Mapping[str, Any]) -> list[Span]:
    outcome = str(row.get("outcome", ""))
    when = time.strftime("%H:%M:%S", time.localtime(float(row.get("wall", 0.0))))
    return [
        (f"{when} ", "dim"),
        (f"{_GLYPHS.get(outcome, '·')} ", _ROLES.get(outcome, "warn")),
        (cut(clean(str(row.get("on_behalf_of") or row.get("client", ""))), _WHO) + " ", "strong"),
        (clean(what(row)), "text"),
    ]


def what(row: Mapping[str, Any]) -> str:
    """What was done in a few words: values before and after, else the command; a refusal's reason."""
    if row.get("outcome") == "refused":
        return f"{row.get('action', '')} refused: {row.get('detail', '')}"
    changed = changes(row)
    reason = f" ({row['reason']})" if row.get("reason") else ""
    return f"{changed or ' '.join(str(row.get(name, '')) for name in ('action', 'detail'))}{reason}"


def changes(row: Mapping[str, Any]) -> str:
    """`max_num_seqs 16 → 8`; empty where no knob was changed."""
    before, after = row.get("before"), row.get("after")
    if not isinstance(before, dict) or not isinstance(after, dict):
        return ""
    return ", ".join(f"{name} {value_text(before.get(name))} → {value_text(new)}" for name, new in after.items())


def who(row: Mapping[str, Any]) -> str:
    """Who it was: for whom the client spoke, the client, the user's number.

    >>> who({"client": "tui", "uid": 1000}), who({"client": "gateway", "on_behalf_of": "ops", "uid": None})
    ('tui (uid 1000)', 'ops via gateway')
    """
    client, spoken_for = str(row.get("client", "")), str(row.get("on_behalf_of") or "")
    speaker = f"{spoken_for} via {client}" if spoken_for else client
    return speaker if row.get("uid") is None else f"{speaker} (uid {row['uid']})"


def long_row(row: Mapping[str, Any]) -> Line:
    """Everything of one row."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(row.get("wall", 0.0))))
    outcome = str(row.get("outcome", ""))
    words = [changes(row), str(row.get("detail") or ""), f"({row['reason']})" if row.get("reason") else ""]
    return (
        (f"{when:<19} {row.get('step', ''):>8}  ", "dim"),
        (cut(clean(who(row)), 18) + " ", "strong"),
        (cut(clean(str(row.get("action", ""))), 18) + " ", "text"),
        (cut(clean(f"{_GLYPHS.get(outcome, '·')} {outcome}"), 13) + " ", _ROLES.get(outcome, "warn")),
        (clean("  ".join(word for word in words if word)), "text"),
    )


LONG_HEAD = f"{'when':<19} {'step':>8}  {'who':<18} {'action':<18} {'outcome':<13} what"
