"""A forecast of a live engine, asked of a process of its own: started at the side, bounded, ended when nobody wants it.

`schedtop forecast` runs the engine's scheduler forward, for seconds of CPU time and at low priority; nothing is
computed here. The screen and the dry runs of playbooks ask this way.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence

import msgspec

from schedtop.engine.knobs import KnobValue
from schedtop.engine.sim.outlook import Forecast

LIMIT_S = 30.0
"""A forecast's own bound is its CPU time; past this, on a busy machine, it is given up."""


class NoForecast(Exception):
    """There is none; the message says why."""


async def ask_forecast(address: str, changes: Mapping[str, KnobValue]) -> Forecast:
    """What `changes` would do to the engine at an address. Raises `NoForecast`."""
    return await ask(command(address, changes), LIMIT_S)


def command(address: str, changes: Mapping[str, KnobValue]) -> list[str]:
    """The command line; the process ends with this one."""
    settings = [word for name, value in changes.items() for word in ("--set", f"{name}={_written(value)}")]
    tied = [sys.executable, "-P", "-m", "schedtop.cli.tied", str(os.getpid())]
    return [*tied, "forecast", "--json", "--connect", address, *settings]


def _written(value: KnobValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


async def ask(arguments: Sequence[str], limit_s: float) -> Forecast:
    """Run a command that prints a forecast; it is killed when it takes longer than `limit_s` or we are cancelled."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )
    try:
        async with asyncio.timeout(limit_s):
            output, faults = await process.communicate()
    except TimeoutError:
        raise NoForecast(f"it took longer than {limit_s:g} s") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        raise NoForecast(_last_words(faults) or f"it ended with status {process.returncode}")
    try:
        return msgspec.json.decode(output, type=Forecast)
    except msgspec.MsgspecError as fault:
        raise NoForecast(f"its answer can't be read: {fault}") from None


def _last_words(faults: bytes) -> str:
    lines = faults.decode(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("schedtop: error: ") if lines else ""
