"""`schedtop bench`: measure speed, side by side with peers. Each benchmark is in a module of its own."""

import click

from schedtop.cli.bench_autopilot import autopilot
from schedtop.cli.bench_control import control
from schedtop.cli.bench_engine import engine
from schedtop.cli.bench_forecast import forecast
from schedtop.cli.bench_scheduler import scheduler
from schedtop.cli.bench_tui import tui


@click.group()
def bench() -> None:
    """Measure speed, side by side with peers."""


bench.add_command(scheduler)
bench.add_command(engine)
bench.add_command(forecast)
bench.add_command(autopilot)
bench.add_command(tui)
bench.add_command(control)
