"""Forecasts for a dry run: of a live engine by a process of its own, of a simulated one right here."""

from collections.abc import Mapping

from schedtop.control.asked_forecast import NoForecast, ask_forecast
from schedtop.control.playbook.plan import Foresee
from schedtop.control.playbook.target import Target
from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import KnobValue
from schedtop.engine.sim.forecast import forecast
from schedtop.engine.sim.outlook import Forecast


def foresee_apart(address: str) -> Foresee:
    """Forecasts of the engine at an address, each by a process of its own, which ends with this one."""

    async def foresee(changes: Mapping[str, KnobValue]) -> Forecast | str:
        try:
            return await ask_forecast(address, changes)
        except NoForecast as error:
            return str(error)

    return foresee


def foresee_here(target: Target) -> Foresee:
    """Forecasts of a simulated engine, computed in this process."""

    async def foresee(changes: Mapping[str, KnobValue]) -> Forecast | str:
        fitted = await target.step_model()
        if fitted is None:
            return "too few steps seen to model a step's time"
        try:
            return forecast(await target.state(), fitted, changes)
        except SchedtopError as error:
            return str(error)

    return foresee
