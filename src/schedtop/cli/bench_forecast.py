"""`schedtop bench forecast`: six knob changes forecast, applied and measured; how right the forecasts were."""

import random
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
import msgspec

from schedtop.cli.engine import DURATION, json_option, say_json
from schedtop.control.build import build
from schedtop.control.settings import ServeSettings
from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.runner.simulated import SimulatedRunner
from schedtop.engine.sim.clock import VirtualClock

if TYPE_CHECKING:
    from schedtop.engine.sim.acceptance import Bench, Outcome, Verdict

VOCAB_SIZE = 16_000
"""Prompts are random tokens below it: every model has as many."""
CALIBRATE_S = 10.0


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="Path, smollm2, or a hub id.")
@click.option("--threads", default=2, type=click.IntRange(1), show_default=True)
@click.option("--simulated", is_flag=True, help="Noisy modelled steps, virtual clock: tries it out.")
@click.option("--repeats", default=3, type=click.IntRange(1), show_default=True, help="Of each change.")
@click.option("--settle", default=6.0, type=DURATION, show_default="6s", help="Load before anything is measured.")
@click.option("--horizon", default=15.0, type=DURATION, show_default="15s", help="Measured before, and after.")
@click.option("--only", multiple=True, metavar="NAME", help="Only these changes, by name.")
@click.option("--seed", default=1, type=int, show_default=True)
@json_option
def forecast(
    model: str, threads: int, simulated: bool, repeats: int, settle: float, horizon: float, only: Sequence[str],
    seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Forecast six knob changes from the live state, apply them, and set what then happened beside it.

    Takes about 11 minutes on a machine that has nothing else to do; there the numbers mean something. Prints a table
    in Markdown.
    """
    from schedtop.engine.sim.acceptance import EXPERIMENTS, Outcome

    known = [experiment.name for experiment in EXPERIMENTS]
    if unknown := [name for name in only if name not in known]:
        raise click.UsageError(f"no change is called {unknown[0]!r}; there are {', '.join(known)}")
    bench = _simulated(seed) if simulated else _real(model, threads)
    bench.calibrate(CALIBRATE_S)
    click.echo(f"this engine's steps take {bench.stretch:.2f} x what the loads were written for", err=True)
    outcomes = []
    for experiment in EXPERIMENTS:
        if only and experiment.name not in only:
            continue
        trials = []
        for number in range(repeats):
            click.echo(f"{experiment.name}, {number + 1} of {repeats} ...", err=True)
            trials.append(bench.run(experiment, seed + number, settle, horizon))
        outcomes.append(Outcome(name=experiment.name, changes=experiment.changes, trials=trials))
    if as_json:
        say_json(outcomes)
    else:
        click.echo("\n".join(report(outcomes)))


def _real(model: str, threads: int) -> "Bench":
    from schedtop.engine.sim import acceptance

    core, info = build(
        ServeSettings(
            model=model,
            threads=threads,
            num_kv_blocks=acceptance.NUM_BLOCKS,
            max_num_batched_tokens=acceptance.MAX_TOKENS,
            max_num_seqs=acceptance.MAX_SEQS,
            max_model_len=acceptance.MAX_LEN,
        )
    )
    click.echo(f"{info.model}: {info.backend}, {threads} threads", err=True)
    return acceptance.Bench(core, VOCAB_SIZE)


def _simulated(seed: int) -> "Bench":
    from schedtop.engine.sim import acceptance

    clock, rng = VirtualClock(), random.Random(seed)
    truth = msgspec.structs.replace(acceptance.WRITTEN_FOR, per_context_token_s=3e-7)
    runner = SimulatedRunner(truth, lambda seconds: clock.advance(seconds * rng.uniform(0.9, 1.15)))
    config = EngineConfig(
        num_kv_blocks=acceptance.NUM_BLOCKS,
        max_num_batched_tokens=acceptance.MAX_TOKENS,
        max_num_seqs=acceptance.MAX_SEQS,
        max_model_len=acceptance.MAX_LEN,
    )
    return acceptance.Bench(EngineCore(config, runner, clock=clock), VOCAB_SIZE, acceptance.Clock(clock, clock.jump_to))


def report(outcomes: "Sequence[Outcome]") -> list[str]:
    """The table, and what it comes to."""
    from schedtop.engine.sim.acceptance import verdicts

    rows = [verdict for outcome in outcomes for verdict in verdicts(outcome)]
    lines = [
        "| change | measure | before | after | ± repeats | forecast | error | direction |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *map(_row, rows),
    ]
    errors = [abs(row.error) for row in rows]
    steps = [error for outcome in outcomes for trial in outcome.trials for error in trial.step_errors]
    num_right = sum(row.is_direction_right for row in rows)
    return [
        *lines,
        "",
        f"direction right in {num_right} of {len(rows)}; error of the value after the change: median "
        f"{statistics.median(errors):.0%}, largest {max(errors):.0%}; step time on {len(steps)} steps after the fit: "
        f"median error {statistics.median(steps):.0%}",
    ]


def _row(row: "Verdict") -> str:
    direction = "right" if row.is_direction_right else "WRONG"
    direction += "" if row.is_clear else " (effect within the spread)"
    before, after, spread, foretold = (f"{s * 1e3:,.0f} ms" for s in (row.before, row.after, row.spread, row.foretold))
    return (
        f"| {row.experiment} | {row.measure} | {before} | {after} | {spread} | {foretold} | {row.error:+.0%} | "
        f"{direction} |"
    )
