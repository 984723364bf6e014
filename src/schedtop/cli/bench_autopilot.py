"""`schedtop bench autopilot`: loads that change, flown by the autopilot and under every static setting of a sweep."""

import asyncio
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click
import msgspec

from schedtop.cli.engine import json_option, say_json
from schedtop.engine.knobs import KnobValue

if TYPE_CHECKING:
    from schedtop.engine.sim.goodput import Served, Slo
    from schedtop.engine.sim.scenario import Scenario

LOADS = ("chats-then-labels", "tides", "day-to-night", "books-arrive")
BUDGETS = (256, 384, 512, 768, 1024, 2048, 8192)
THRESHOLDS = (0, 64, 128, 256)
TTFT_S, ITL_S = 1.5, 0.022


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One load, drawn once."""

    load: str
    seed: int
    autopilot: "Served"
    num_moves: int
    best_static: "Served"
    best_setting: dict[str, KnobValue]
    start: "Served"
    """With the knobs it started with."""


@click.command()
@click.option("--seeds", default=2, type=click.IntRange(1), show_default=True, help="Draws of each load.")
@click.option("--only", multiple=True, metavar="SCENARIO", help="These loads, shipped or files of yours.")
@click.option("--quick", is_flag=True, help="A sweep of four settings: tries it out.")
@json_option
def autopilot(seeds: int, only: Sequence[str], quick: bool, as_json: bool) -> None:
    """Fly the autopilot in loads that change, against the best static setting of a sweep on the very same arrivals.

    Promises: first token within 1.5 s, gaps within 22 ms. Virtual time; takes some minutes for each load and draw.
    Prints a table in Markdown.
    """
    from schedtop.engine.sim.goodput import Slo
    from schedtop.engine.sim.scenario import load_scenario

    slo = Slo(ttft_s=TTFT_S, itl_s=ITL_S)
    settings = list(_settings((256, 2048), (0, 256)) if quick else _settings(BUDGETS, THRESHOLDS))
    rows = []
    for scenario, seed in itertools.product([load_scenario(name) for name in only or LOADS], range(1, seeds + 1)):
        click.echo(f"{scenario.name}, seed {seed} ...", err=True)
        rows.append(_measure(scenario, seed, slo, settings))
    if as_json:
        say_json(rows)
    else:
        click.echo("\n".join(report(rows)))


def _settings(budgets: Sequence[int], thresholds: Sequence[int]) -> Iterator[dict[str, KnobValue]]:
    """Every static setting that is tried; a threshold of a whole budget is none."""
    for budget, threshold in itertools.product(budgets, thresholds):
        if threshold < budget:
            yield {"max_num_batched_tokens": budget, "long_prefill_token_threshold": threshold}


def _measure(scenario: "Scenario", seed: int, slo: "Slo", settings: Sequence[dict[str, KnobValue]]) -> Row:
    from schedtop.control.playbook.autopilot import Autopilot
    from schedtop.control.playbook.simulated import simulated
    from schedtop.engine.sim.autopilot import bounds_of
    from schedtop.engine.sim.goodput import served

    with simulated(scenario, seed) as (engine, target):
        flight = asyncio.run(Autopilot(target, slo, bounds_of(target.specs, {})).run())
        engine.finish()
        flown = served(engine.simulation.result, slo)
    swept = [(_left_alone(scenario, seed, slo, setting), setting) for setting in settings]
    best, setting = max(swept, key=lambda pair: pair[0].num_good)
    return Row(
        load=scenario.name,
        seed=seed,
        autopilot=flown,
        num_moves=len(flight.moves),
        best_static=best,
        best_setting=setting,
        start=_left_alone(scenario, seed, slo, {}),
    )


def _left_alone(scenario: "Scenario", seed: int, slo: "Slo", setting: Mapping[str, KnobValue]) -> "Served":
    from schedtop.engine.sim.goodput import served

    simulation = scenario.simulation(dict(setting), seed)
    try:
        return served(simulation.run(scenario.horizon_s), slo)
    finally:
        simulation.core.shutdown()


def report(rows: Sequence[Row]) -> list[str]:
    """The table, and in how many loads the autopilot is ahead without paying for it."""
    lines = [
        "| load | seed | | in time | goodput | refused | ITL p99 | TTFT p95 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        setting = ", ".join(f"{value}" for value in row.best_setting.values())
        for what, found in (
            (f"autopilot, {row.num_moves} moves", row.autopilot),
            (f"best static ({setting})", row.best_static),
            ("as it started", row.start),
        ):
            lines.append(f"| {row.load} | {row.seed} | {what} | {_cells(found)} |")
    ahead = {row.load for row in rows} - {row.load for row in rows if not is_ahead(row)}
    return [
        *lines,
        "",
        f"ahead of the best static setting on goodput, with no more refused and no worse p99 gap, in every draw: "
        f"{len(ahead)} of {len({row.load for row in rows})} loads",
    ]


def is_ahead(row: Row) -> bool:
    """More in time, and neither bought with refusals nor with gaps."""
    flown, static = row.autopilot, row.best_static
    return (
        flown.num_good > static.num_good
        and flown.num_refused <= static.num_refused
        and (flown.itl_p99_s or 0.0) <= (static.itl_p99_s or 0.0)
    )


def _cells(found: "Served") -> str:
    gap, wait = (
        "-" if seconds is None else f"{seconds * 1e3:,.0f} ms" for seconds in (found.itl_p99_s, found.ttft_p95_s)
    )
    return (
        f"{found.num_good} of {found.num_requests} | {found.goodput_per_s:.2f}/s | {found.num_refused} | {gap} | {wait}"
    )
