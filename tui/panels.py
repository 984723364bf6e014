"""The registry of panels: to add one, write its view function and add one entry here. Draws and decides nothing.

An entry gives the panel its number key, its line in help and registry, and its turn under Tab. In the small layout, and
where `layout.py` gives it no place of its own, it takes the main place while it has the focus.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from schedtop.tui.state import Scene
from schedtop.tui.views.advisor import advisor
from schedtop.tui.views.audit import audit
from schedtop.tui.views.budget import budget
from schedtop.tui.views.decisions import decisions
from schedtop.tui.views.frame import Body
from schedtop.tui.views.knobs import knobs
from schedtop.tui.views.kv import kv
from schedtop.tui.views.latency import latency
from schedtop.tui.views.lifeline import lifeline
from schedtop.tui.views.playbooks import playbooks
from schedtop.tui.views.requests import requests
from schedtop.tui.views.timeline import timeline

View = Callable[[Scene, int, int], Body]
"""(scene, width, height) -> lines."""


@dataclass(frozen=True, slots=True)
class PanelSpec:
    """One panel. `key` is the digit that focuses it; without one it is only shown beside others."""

    key: str
    title: str
    view: View
    label: str = ""
    help: str = ""
    footer: int = 0
    """Place of its key in the footer, small first; 0 = not there."""


PANELS: Mapping[str, PanelSpec] = {
    "budget": PanelSpec("1", "token budget", budget, "budget", "token budget over time"),
    "kv": PanelSpec("2", "KV blocks", kv, "KV", "KV pool and block map"),
    "requests": PanelSpec("3", "requests", requests, "requests", "request table"),
    "latency": PanelSpec("4", "latency", latency, "latency", "latency percentiles"),
    "knobs": PanelSpec("5", "knobs", knobs, "knobs", "the knobs (then: + -, a number, Enter)", footer=4),
    "decisions": PanelSpec("6", "preemptions", decisions, "log", "decision log: who was preempted for whom"),
    "advisor": PanelSpec("7", "advisor", advisor, "advisor", "findings and what to turn"),
    "timeline": PanelSpec("8", "time axis", timeline, "time axis", "preemptions, knob changes and alerts on one axis"),
    "playbooks": PanelSpec("9", "playbooks", playbooks, "playbooks", "playbooks: Enter tries one dry, or stops it"),
    "audit": PanelSpec("", "audit", audit),
    "lifeline": PanelSpec("", "lifeline", lifeline),
}

FOCUSABLE = tuple(name for name, spec in PANELS.items() if spec.key)
"""Panels that can have the focus, in the order of Tab."""
