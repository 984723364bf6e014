"""`schedtop bench`: measure speed, side by side with peers. Each benchmark is in a module of its own."""

import click

from schedtop.cli.bench_engine import engine
from schedtop.cli.bench_scheduler import scheduler


@click.group()
def bench() -> None:
    """Measure speed, side by side with peers."""


bench.add_command(scheduler)
bench.add_command(engine)
