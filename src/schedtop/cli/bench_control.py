"""`schedtop bench control`: what watchers cost the engine's steps, and how long a command takes."""

from typing import TYPE_CHECKING

import click

from schedtop.cli.engine import json_option, say_json, table

if TYPE_CHECKING:
    from schedtop.control.bench import Summary

MEDIAN_GOAL, P99_GOAL = 1.01, 1.03
"""Steps with clients to steps without; where the spread of no client against itself is larger, that counts."""
TRIP_GOAL_S = 0.001
"""Beyond one step, for a command and its reply."""


@click.command()
@click.option("--rounds", default=20, type=click.IntRange(1), show_default=True, help="Of all configurations in turn.")
@click.option("--requests", default=1000, type=click.IntRange(1), show_default=True, help="In flight all the time.")
@click.option("--steps", default=120, type=click.IntRange(2), show_default=True, help="Per configuration and round.")
@click.option("--step-ms", default=10.0, type=click.FloatRange(0.0, min_open=True), show_default=True)
@json_option
def control(rounds: int, requests: int, steps: int, step_ms: float, as_json: bool) -> None:
    """Step times without a client, with one and ten screens at 10 Hz, and with one that never reads.

    The runner is simulated, in real time. Configurations alternate; shown is the median over rounds of each round's
    median, and of its p99. "no client again" shows how far no client is from itself. Also timed: a command's way to
    the engine and back.
    """
    from schedtop.control.bench import Load, measure, summarise

    load = Load(num_requests=requests, step_s=step_ms / 1e3, num_steps=steps)
    results = measure(load, rounds, lambda number: click.echo(f"round {number + 1} of {rounds}", err=True))
    summary = summarise(results)
    if as_json:
        say_json({"load": load, "num_rounds": rounds, **_public(summary)})
        return
    for line in report(summary):
        click.echo(line)


def _public(summary: "Summary") -> dict[str, object]:
    return {name: getattr(summary, name) for name in summary.__struct_fields__} | {"within_goal": within_goal(summary)}


def within_goal(summary: "Summary") -> dict[str, bool]:
    """Per configuration: no slower than the goal, or than the spread of no client against itself."""
    return {
        name: figures.median_ratio <= max(MEDIAN_GOAL, summary.median_spread)
        and figures.p99_ratio <= max(P99_GOAL, summary.p99_spread)
        for name, figures in summary.configurations.items()
    }


def report(summary: "Summary") -> list[str]:
    """A row per configuration, the spread, and the round trips. CPU: of the engine's thread; then of the server."""
    verdicts = within_goal(summary)
    rows = [
        (
            name,
            f"{figures.median_s * 1e3:.2f}",
            f"{_percent(figures.median_ratio)}",
            f"{figures.p99_s * 1e3:.2f}",
            f"{_percent(figures.p99_ratio)}",
            f"{figures.cpu_median_s * 1e3:.2f}",
            f"{_percent(figures.cpu_median_ratio)}",
            f"{_percent(figures.cpu_p99_ratio)}",
            f"{figures.serving_s * 1e3:.3f}",
            "yes" if verdicts[name] else "no",
        )
        for name, figures in summary.configurations.items()
    ]
    headings = ("", "median ms", "", "p99 ms", "", "its CPU ms", "", "p99", "server's CPU ms", "within goal")
    return [
        *table(headings, rows).splitlines(),
        f"no client against itself: median {_percent(summary.median_spread)}, p99 {_percent(summary.p99_spread)}, "
        f"CPU {_percent(summary.cpu_median_spread)}, its p99 {_percent(summary.cpu_p99_spread)}",
        _trips("command and reply", summary.plain_trip_s, summary.step_s),
        _trips("the same, audited", summary.audited_trip_s, summary.step_s),
    ]


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _trips(what: str, trips: list[float], step_s: float) -> str:
    median, p99, longest = trips
    verdict = "within" if median <= step_s + TRIP_GOAL_S else "over"
    return (
        f"{what}: median {median * 1e3:.2f} ms = {median / step_s:.2f} steps, p99 {p99 * 1e3:.2f} ms, "
        f"longest {longest * 1e3:.2f} ms; median {verdict} one step + {TRIP_GOAL_S * 1e3:g} ms"
    )
