"""Forecasts for a dry run: of a live engine by a process of its own, of a simulated one right here.

`schedtop forecast` runs the scheduler forward, for seconds of CPU time, at low priority; here is only how it is asked.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence

import msgspec

from schedtop.control.playbook.plan import Foresee
from schedtop.control.playbook.target import Target
from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import KnobValue
from schedtop.engine.sim.forecast import forecast
from schedtop.engine.sim.outlook import Forecast

LIMIT_S = 30.0
"""A forecast's own bound is its CPU time; past this, on a busy machine, it is given up."""


def foresee_apart(address: str) -> Foresee:
    """Forecasts of the engine at an address, each by a process of its own, which ends with this one."""

    async def foresee(changes: Mapping[str, KnobValue]) -> Forecast | str:
        settings = [word for name, value in changes.items() for word in ("--set", f"{name}={_written(value)}")]
        tied = [sys.executable, "-P", "-m", "schedtop.cli.tied", str(os.getpid())]
        return await _ask([*tied, "forecast", "--json", "--connect", address, *settings])

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


def _written(value: KnobValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


async def _ask(arguments: Sequence[str]) -> Forecast | str:
    """Run a command that prints a forecast; it is killed when it takes too long or we are cancelled."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            output, faults = await process.communicate()
    except TimeoutError:
        return f"it took longer than {LIMIT_S:g} s"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        lines = faults.decode(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("schedtop: error: ") if lines else f"it ended with status {process.returncode}"
    try:
        return msgspec.json.decode(output, type=Forecast)
    except msgspec.MsgspecError as error:
        return f"its answer can't be read: {error}"
