"""Which view function draws which panel. From scene and plan to lines; for the screen and `--once`."""

from collections.abc import Callable, Iterable, Mapping

from schedtop.tui.alerts import find_alerts
from schedtop.tui.cells import Line, fit
from schedtop.tui.keys import footer
from schedtop.tui.layout import MIN_HEIGHT, MIN_WIDTH, Place
from schedtop.tui.playback import replay_bar
from schedtop.tui.state import Scene
from schedtop.tui.views import overview
from schedtop.tui.views.advisor import advisor
from schedtop.tui.views.budget import budget
from schedtop.tui.views.decisions import decisions
from schedtop.tui.views.frame import Body, framed, inner_size
from schedtop.tui.views.knobs import knobs
from schedtop.tui.views.kv import kv
from schedtop.tui.views.latency import latency
from schedtop.tui.views.lifeline import lifeline
from schedtop.tui.views.requests import requests
from schedtop.tui.views.timeline import timeline

View = Callable[[Scene, int, int], Body]

PANELS: Mapping[str, tuple[str, str, View]] = {
    "budget": ("1", "token budget", budget),
    "kv": ("2", "KV blocks", kv),
    "requests": ("3", "requests", requests),
    "latency": ("4", "latency", latency),
    "knobs": ("5", "knobs", knobs),
    "decisions": ("6", "preemptions", decisions),
    "advisor": ("7", "advisor", advisor),
    "timeline": ("8", "time axis", timeline),
    "lifeline": ("", "lifeline", lifeline),
}
"""Panel name -> (key, title, view function)."""


def draw(name: str, scene: Scene, place: Place, keymap: Mapping[str, str], dead: Iterable[str] = ()) -> list[Line]:
    """The finished lines of one panel or strip."""
    if name in PANELS:
        key, title, view = PANELS[name]
        width, height = inner_size(place.frame, place.width, place.height)
        body = view(scene, width, height)
        return framed(body, title, key, place.frame, (place.width, place.height), scene.ui.focus == name)
    return [fit(_strip(name, scene, place, keymap, dead), place.width)] + [
        fit((), place.width) for _ in range(place.height - 1)
    ]


def _strip(name: str, scene: Scene, place: Place, keymap: Mapping[str, str], dead: Iterable[str]) -> Line:
    width, snapshot = place.width, scene.view.snapshot
    match name:
        case "identity":
            return overview.identity(scene, width)
        case "alerts":
            return overview.alert_strip(find_alerts(scene), width)
        case "action":
            is_filter = scene.ui.prompt is not None
            playback = scene.ui.playback
            return replay_bar(playback, width) if playback and not is_filter else overview.action_line(scene, width)
        case "keys":
            return footer(width, keymap, dead, scene.ui.playback is not None)
        case "tiny":
            return ((f"needs {MIN_WIDTH}x{MIN_HEIGHT}", "text"),)
    if snapshot is None:
        return ()
    match name:
        case "budget_line":
            return overview.budget_line(snapshot, width)
        case "sequences_line":
            return overview.sequences_line(scene, snapshot, width)
        case "kv_line":
            return overview.kv_line(scene, snapshot, width)
        case "latency_line":
            return overview.latency_line(scene, width)
    raise AssertionError(f"no panel is called {name}")
