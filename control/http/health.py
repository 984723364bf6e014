"""Is the engine alive? Judged by the age of its last finished step while work is pending. Pure: no clock, no engine."""

from schedtop.engine.snapshot import PauseState, Snapshot


class StallWatch:
    """Remembers when the engine was last seen to move on. `now` is any monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._last_step: int | None = None
        self._moved_at: float | None = None
        """Last sight of a new step, or of an engine with nothing to do."""

    def see(self, snapshot: Snapshot, now: float) -> None:
        """Take a snapshot of this moment."""
        step = snapshot.last_step.step if snapshot.last_step else None
        has_work = snapshot.num_running + snapshot.num_waiting > 0
        is_moving = step != self._last_step or not has_work or snapshot.pause is not PauseState.RUNNING
        if is_moving or self._moved_at is None:
            self._moved_at = now
        self._last_step = step

    def age_s(self, now: float) -> float:
        """How long nothing has moved although something should have; it also grows while no snapshot comes."""
        return 0.0 if self._moved_at is None else max(0.0, now - self._moved_at)
