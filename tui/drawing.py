"""Which view function draws which panel. From scene and plan to lines; for the screen and `--once`."""

from collections.abc import Iterable, Mapping

from schedtop.tui.alerts import find_alerts
from schedtop.tui.cells import Line, fit
from schedtop.tui.keys import footer
from schedtop.tui.layout import MIN_HEIGHT, MIN_WIDTH, Place
from schedtop.tui.panels import PANELS
from schedtop.tui.playback import replay_bar
from schedtop.tui.state import Scene
from schedtop.tui.views import overview
from schedtop.tui.views.frame import framed, inner_size


def draw(name: str, scene: Scene, place: Place, keymap: Mapping[str, str], dead: Iterable[str] = ()) -> list[Line]:
    """The finished lines of one panel or strip."""
    if name in PANELS:
        spec = PANELS[name]
        width, height = inner_size(place.frame, place.width, place.height)
        body = spec.view(scene, width, height)
        return framed(body, spec.title, spec.key, place.frame, (place.width, place.height), scene.ui.focus == name)
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
            return overview.action_rest(scene, width) or footer(width, keymap, dead, scene.ui.playback is not None)
        case "tiny":
            return ((f"needs {MIN_WIDTH}x{MIN_HEIGHT}", "text"),)
    if snapshot is None:
        return ()
    match name:
        case "budget_line":
            return overview.budget_line(snapshot, width, "budget")
        case "sequences_line":
            return overview.sequences_line(scene, snapshot, width)
        case "next_line":
            return overview.next_line(scene, snapshot, width)
        case "preempted_line":
            return overview.preempted_line(scene, snapshot, width)
        case "kv_line":
            return overview.kv_line(scene, snapshot, width)
        case "latency_line":
            return overview.latency_line(scene, width)
    raise AssertionError(f"no panel is called {name}")
