"""What `schedtop forecast --from` starts from: a moment of a recording or of a scenario, and what came after it.

No forecast is made here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from schedtop.control.recorded_state import RecordedState
from schedtop.control.recorder import Recording, is_recording
from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import KnobValue
from schedtop.engine.sim.outlook import Outlook, Tally, outlook_over
from schedtop.engine.sim.scenario import load_scenario
from schedtop.engine.sim.state import EngineState
from schedtop.engine.sim.step_model import FittedModel, StepModelFit

DEFAULT_AT_S = 20.0
"""Into a scenario."""


class Happened(msgspec.Struct, frozen=True):
    """What came after the moment of the forecast."""

    heading: str
    outlook: Outlook


class Basis(Protocol):
    """A moment to look ahead from."""

    @property
    def state(self) -> EngineState:
        """The scheduling state then."""
        ...

    @property
    def fitted(self) -> FittedModel:
        """The step model of the steps before."""
        ...

    def happens(self, changes: Mapping[str, KnobValue], horizon_s: float) -> Happened | None:
        """What then came; None where that isn't known."""
        ...


def from_file(source: str, at_s: float | None, seed: int | None, horizon_s: float) -> Basis:
    """A recording, a scenario file, or a shipped scenario by name. Raises `SchedtopError`."""
    path = Path(source)
    if is_recording(path):
        return _FromRecording(Recording(path), at_s, horizon_s)
    return _FromScenario(source, DEFAULT_AT_S if at_s is None else at_s, seed)


class _FromRecording(RecordedState):
    def happens(self, changes: Mapping[str, KnobValue], horizon_s: float) -> Happened | None:
        """What the recording goes on with: the knobs as they were."""
        if not self.later:
            return None
        tally = Tally(self.state.mono)
        for record in self.later:
            if record.mono <= tally.began + horizon_s:
                tally.add(record)
        return Happened("as it was", outlook_over([tally], horizon_s))


class _FromScenario:
    def __init__(self, source: str, at_s: float, seed: int | None) -> None:
        fit = StepModelFit()
        self._simulation = load_scenario(source).simulation(seed=seed, watch=lambda core, record: fit.add(record))
        self._simulation.run(at_s)
        fitted = fit.fitted()
        if fitted is None:
            raise SchedtopError(f"{source}: too few steps in its first {at_s:g} s to model a step's time; give --at")
        self.fitted = fitted
        self.state = self._simulation.core.state()

    def happens(self, changes: Mapping[str, KnobValue], horizon_s: float) -> Happened | None:
        """What the scenario goes on with, the changes made."""
        simulation = self._simulation
        tally = Tally(self.state.mono)
        simulation.watch(lambda core, record: tally.add(record))
        simulation.core.set_knobs(changes)
        simulation.run(self.state.mono + horizon_s)
        return Happened("as it goes then" if changes else "as it goes", outlook_over([tally], horizon_s))
