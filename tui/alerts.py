"""What must not be missed, worst first. Pure: from a scene to a list. Advice (what to turn) is in `advisor.py`."""

from dataclasses import dataclass, replace
from enum import IntEnum

from schedtop.engine.snapshot import PauseState, Snapshot
from schedtop.tui.cells import clean
from schedtop.tui.format import age, rate
from schedtop.tui.state import EngineView, LinkEvent, Phase, Received, Scene, fold, rates

STALL_AFTER_S = 2.0
STORM_PER_S = 1.0
RESTART_SHOWN_S = 60.0


class Severity(IntEnum):
    """Worst first."""

    DOWN = 0
    BAD = 1
    WARN = 2
    NOTE = 3


@dataclass(frozen=True, slots=True)
class Alert:
    """One line for the strip."""

    severity: Severity
    name: str
    """What it is called where there is no room for its words: on the time axis."""
    text: str

    @property
    def glyph(self) -> str:
        """Readable without colour."""
        return {Severity.DOWN: "✗", Severity.BAD: "!!", Severity.WARN: "!", Severity.NOTE: "i"}[self.severity]

    @property
    def role(self) -> str:
        """The theme's role for it."""
        return {Severity.DOWN: "down", Severity.BAD: "bad", Severity.WARN: "warn", Severity.NOTE: "note"}[self.severity]


def folded(view: EngineView, event: LinkEvent, now: float) -> EngineView:
    """`fold`, with the alerts that stand afterwards noted in the newest sample: the time axis draws them."""
    view = fold(view, event, now)
    if not isinstance(event, Received) or not view.samples:
        return view
    names = tuple(alert.name for alert in find_alerts(Scene(view, now=now)))
    newest = view.samples[-1]
    if newest.alerts == names:
        return view
    return replace(view, samples=(*view.samples[:-1], replace(newest, alerts=names)))


def find_alerts(scene: Scene) -> list[Alert]:
    """All alerts of the engine on screen, worst first."""
    alerts = _of_link(scene)
    snapshot = scene.view.snapshot
    if snapshot is not None and scene.view.phase is Phase.LIVE:
        alerts += _of_engine(scene, snapshot)
    return sorted(alerts, key=lambda alert: alert.severity)


def _of_link(scene: Scene) -> list[Alert]:
    view, alerts = scene.view, []
    if view.phase is Phase.LOST:
        text = f"ENGINE GONE for {age(scene.now - view.changed_at)}, reconnecting: {clean(view.reason)}"
        alerts.append(Alert(Severity.DOWN, "engine gone", text))
    elif scene.is_stale:
        alerts.append(Alert(Severity.BAD, "no data", f"no data for {age(view.age(scene.now))}: what is shown is old"))
    if view.restarted_at is not None and scene.now - view.restarted_at < RESTART_SHOWN_S:
        boot = view.welcome.info.boot_id if view.welcome else ""
        text = f"the engine was restarted (boot {clean(boot[:8])}): live knob changes were lost, start values are back"
        alerts.append(Alert(Severity.WARN, "restarted", text))
    if view.num_missed_events:
        text = f"{view.num_missed_events} events were missed by this screen"
        alerts.append(Alert(Severity.NOTE, "events missed", text))
    return alerts


def _of_engine(scene: Scene, snapshot: Snapshot) -> list[Alert]:
    alerts = []
    if (stalled := stalled_for(scene, snapshot)) > STALL_AFTER_S:
        work = f"{snapshot.num_running} running, {snapshot.num_waiting} waiting"
        alerts.append(Alert(Severity.BAD, "stalled", f"STALLED: {work}, but the last step ended {age(stalled)} ago"))
    if snapshot.pause is not PauseState.RUNNING:
        what = "nothing is scheduled" if snapshot.pause is PauseState.PAUSED_ALL else "nobody new is admitted"
        text = f"engine paused ({snapshot.pause.value}): {what}; P resumes"
        alerts.append(Alert(Severity.WARN, "engine paused", text))
    speed = rates(scene.view, scene.now)
    if speed and speed.preemptions > STORM_PER_S and snapshot.pause is PauseState.RUNNING:
        text = f"THRASH: {rate(speed.preemptions)} preemptions/s, {rate(speed.lost)} computed tokens/s thrown away"
        alerts.append(Alert(Severity.BAD, "thrash", text))
    if scene.view.update is not None and scene.view.update.shutting_down:
        alerts.append(Alert(Severity.WARN, "shutting down", "the engine is ending: it takes no new requests"))
    if pending := (scene.view.update.pending_change if scene.view.update else None):
        left = max(0.0, pending.rolls_back_at_mono - scene.engine_now)
        text = f"change {pending.change_id} is undone in {left:.0f} s unless kept (K)"
        alerts.append(Alert(Severity.WARN, "undone unless kept", text))
    if head := head_blocked(snapshot):
        alerts.append(Alert(Severity.NOTE, "head blocked", head))
    return alerts


def stalled_for(scene: Scene, snapshot: Snapshot) -> float:
    """Seconds since the last step while work is pending; 0 when idle or paused."""
    has_work = snapshot.num_running or snapshot.num_waiting > snapshot.num_deferred
    if not has_work or snapshot.pause is not PauseState.RUNNING or snapshot.last_step_mono is None:
        return 0.0
    return max(0.0, scene.engine_now - snapshot.last_step_mono)


def head_blocked(snapshot: Snapshot) -> str:
    """Who blocks the queue, what it needs, how many stand behind it and how much room lies idle."""
    behind = snapshot.waiting_by_reason.get("behind a blocked request", 0)
    head = next((row for row in snapshot.waiting if row.wait_reason == "KV blocks"), None)
    if not behind or head is None:
        return ""
    detail = clean(head.wait_detail) or "needs more KV blocks than are free"
    return f"head blocked by KV: {clean(head.request_id)} {detail} of {snapshot.pool.usable}; {behind} wait behind it"
