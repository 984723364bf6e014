"""The forecast of a staged change: asked of a process of its own, read, worded. It never computes one.

`schedtop forecast` runs the engine's scheduler forward, for seconds of CPU time; here is only how it is started at the
side, bounded, and ended when nobody wants its answer any more.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from schedtop.engine.knobs import KnobValue

SETTLE_S = 0.4
"""How long a staged value must stand before a process is started for it: keys repeat."""
LIMIT_S = 30.0


class Range(msgspec.Struct, frozen=True):
    """A measure over several draws of the future: median, smallest, largest."""

    mid: float
    low: float
    high: float


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What the knob panel shows of the horizon under one knob set; times in seconds, None = no sample."""

    ttft_p95_s: Range | None = None
    itl_p99_s: Range | None = None
    preemptions: Range | None = None


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What `schedtop forecast --json` says, as far as the screen shows it."""

    horizon_s: float
    now: Outlook
    then: Outlook
    num_draws: int = 1
    warnings: list[str] = []


class Prospect(msgspec.Struct, frozen=True, kw_only=True):
    """How the forecast of `changes` stands: there, or not (yet) and why."""

    changes: Mapping[str, KnobValue]
    forecast: Forecast | None = None
    reason: str = ""


class NoForecast(Exception):
    """There is none; the message says why."""


Forecaster = Callable[[str, Mapping[str, KnobValue]], Awaitable[Forecast]]
"""(address, changes) -> the forecast. Raises `NoForecast`. Cancelled when the answer isn't wanted any more."""


async def forecast_apart(address: str, changes: Mapping[str, KnobValue]) -> Forecast:
    """Ask a process of its own, which lowers its priority and bounds its CPU time. Raises `NoForecast`."""
    await asyncio.sleep(SETTLE_S)
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
