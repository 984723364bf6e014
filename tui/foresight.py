"""The forecast of a staged change as the screen holds it: asked for once the value stands. It never computes one."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from schedtop.control.asked_forecast import ask_forecast
from schedtop.engine.knobs import KnobValue
from schedtop.engine.sim.outlook import Forecast

SETTLE_S = 0.4
"""How long a staged value must stand before a process is started for it: keys repeat."""


class Prospect(msgspec.Struct, frozen=True, kw_only=True):
    """How the forecast of `changes` stands: there, or not (yet) and why."""

    changes: Mapping[str, KnobValue]
    forecast: Forecast | None = None
    reason: str = ""


Forecaster = Callable[[str, Mapping[str, KnobValue]], Awaitable[Forecast]]
"""(address, changes) -> the forecast. Raises `NoForecast`. Cancelled when the answer isn't wanted any more."""


async def forecast_apart(address: str, changes: Mapping[str, KnobValue]) -> Forecast:
    """Ask a process of its own once the value has settled. Raises `NoForecast`."""
    await asyncio.sleep(SETTLE_S)
    return await ask_forecast(address, changes)
