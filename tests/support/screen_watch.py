"""What a screen would know of an engine behind a link of the screen's tests. No fixtures in here."""

from schedtop.control.messages import SnapshotUpdate
from schedtop.engine.snapshot import Viewport
from schedtop.tui.advisor import find
from schedtop.tui.alerts import folded
from schedtop.tui.state import EngineView, LinkUp, Received, Scene


class Watch:
    """Folds what an engine publishes, as a screen would."""

    def __init__(self, link) -> None:
        self.link = link
        self.view = folded(EngineView(link.target), LinkUp(link.target, link.welcome()), link.clock())

    def look(self, num_steps: int = 0) -> Scene:
        """The scene after `num_steps` more steps, published every fourth."""
        for done in range(0, max(1, num_steps), 4):
            self.link.play(min(4, num_steps - done))
            update = SnapshotUpdate(
                snapshot=self.link.core.snapshot(Viewport()), steps=self.link._fresh, latencies=self.link.latencies()
            )
            self.link._fresh = []
            self.view = folded(self.view, Received(self.link.target, update), self.link.clock())
        return Scene(self.view, now=self.link.clock())


def findings_of(scene: Scene) -> dict:
    """Findings by name."""
    return {finding.name: finding for finding in find(scene)}
