"""A container that puts panels where a plan says. The plan comes from `schedtop.tui.layout`."""

from textual.geometry import NULL_OFFSET, NULL_SPACING, Region, Size
from textual.layout import ArrangeResult, Layout, WidgetPlacement
from textual.widget import Widget

from schedtop.tui.layout import Plan
from schedtop.tui.widgets.panel import Panel


class PlanLayout(Layout):
    """Textual layout that obeys a plan; panels that it doesn't name are not shown."""

    name = "plan"

    def __init__(self) -> None:
        self.plan: Plan = {}

    def arrange(self, parent: Widget, children: list[Widget], size: Size, greedy: bool = True) -> ArrangeResult:
        """Place the children that the plan names."""
        return [
            WidgetPlacement(Region(place.x, place.y, place.width, place.height), NULL_OFFSET, NULL_SPACING, child)
            for child in children
            if child.name and (place := self.plan.get(child.name)) and place.width > 0 and place.height > 0
        ]


class Board(Widget):
    """Holds the panels; makes one when a plan first names it."""

    DEFAULT_CSS = "Board { width: 1fr; height: 1fr; overflow: hidden; }"

    def __init__(self, is_ascii: bool = False) -> None:
        super().__init__()
        self._is_ascii = is_ascii
        self._arranger = PlanLayout()
        self._default_layout = self._arranger  # type: ignore[assignment]
        self.panels: dict[str, Panel] = {}

    @property
    def plan(self) -> Plan:
        """Where the panels are."""
        return self._arranger.plan

    def arrange_by(self, plan: Plan) -> None:
        """Move the panels to where `plan` says."""
        if plan == self._arranger.plan:
            return
        self._arranger.plan = plan
        new = [Panel(name, self._is_ascii) for name in plan if name not in self.panels]
        self.panels.update({panel.name or "": panel for panel in new})
        if new:
            self.mount(*new)
        for panel in self.panels.values():
            panel.refresh(layout=True)  # on a child: it is what makes Textual arrange its parent again
