"""`schedtop sim`: situations run through the engine's own scheduler on a virtual clock. No engine is needed."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from schedtop.cli.charts import chart
from schedtop.cli.values import KNOB_ASSIGNMENT, as_changes
from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import KNOB_NAMES, KnobValue
from schedtop.engine.sim import paper as tables
from schedtop.engine.sim.scenario import load_scenario, shipped_scenarios, trace_scenario
from schedtop.engine.sim.summary import Summary, summarise
from schedtop.engine.sim.trace import read_trace

Changes = Mapping[str, KnobValue]


@click.group()
def sim() -> None:
    """Simulate situations with the engine's own scheduler."""


@sim.command()
@click.argument("table", type=click.Choice(["A", "B"], case_sensitive=False), required=False)
@click.option("--set", "changes", type=KNOB_ASSIGNMENT, multiple=True, metavar="NAME=VALUE", help="One row with this.")
@click.option("--json", "as_json", is_flag=True, help="Unrounded values.")
def paper(table: str | None, changes: Sequence[tuple[str, KnobValue]], as_json: bool) -> None:
    """Print the documentation's two tables: what budget, threshold and cap do.

    With a table and --set: exactly one row, over the table's defaults.
    """
    if changes and table is None:
        raise click.UsageError("--set needs a table: A or B")
    chosen = [table.upper()] if table else ["A", "B"]
    rows_of: dict[str, tuple[Callable[[Changes], msgspec.Struct], Sequence[Changes]]] = {
        "A": (tables.run_a, tables.ROWS_A),
        "B": (tables.run_b, tables.ROWS_B),
    }
    results = {
        name: [run(row) for row in ([dict(changes)] if changes else rows)]
        for name, (run, rows) in rows_of.items()
        if name in chosen
    }
    if as_json:
        click.echo(msgspec.json.encode(results).decode())
        return
    for name, rows in results.items():
        click.echo(f"{name}.")
        click.echo(_table([msgspec.structs.asdict(row) for row in rows]))


@sim.command(name="list")
def list_scenarios() -> None:
    """List the scenarios that come with schedtop."""
    for name in shipped_scenarios():
        click.echo(f"{name:26}{load_scenario(name).description}")


@sim.command()
@click.argument("scenario")
@click.option(
    "--set", "changes", type=KNOB_ASSIGNMENT, multiple=True, metavar="NAME=VALUE", help="Another start value."
)
@click.option("--seed", type=int, help="Draw another load than the file's.")
@click.option("--json", "as_json", is_flag=True, help="Unrounded values.")
def run(scenario: str, changes: Sequence[tuple[str, KnobValue]], seed: int | None, as_json: bool) -> None:
    """Run a scenario: a TOML file, or the name of a shipped one (see `schedtop sim list`)."""
    loaded = load_scenario(scenario)
    simulation = loaded.simulation(as_changes(changes), seed)
    began = time.process_time()
    summary = summarise(simulation.run(loaded.horizon_s))
    cpu_s = time.process_time() - began
    if as_json:
        click.echo(msgspec.json.encode(summary).decode())
        return
    click.echo(_in_words(summary))
    if cpu_s > 0:
        click.echo(f"{cpu_s:.2f} s of CPU: {summary.makespan_s / cpu_s:.0f} times real time")


@sim.command(name="import")
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the scenario there, not here.")
@click.option("--speed", type=click.FloatRange(0, min_open=True), default=1.0, help="Play it so many times faster.")
@click.option("--limit", type=click.IntRange(1), help="Only the first rows.")
def import_trace(trace: Path, output: Path | None, speed: float, limit: int | None) -> None:
    """Make a scenario of a request trace: a CSV of arrival times, prompt and output lengths.

    Reads the Azure LLM inference traces, BurstGPT, and others whose columns are named so.
    """
    read = read_trace(trace, limit)
    target = output or trace.with_suffix(".toml")
    if target.exists():
        raise SchedtopError(f"{target} exists already: name another with --output")
    target.write_text(trace_scenario(trace, target, read, speed, limit))
    left_out = f" ({read.num_left_out} without an answer left out)" if read.num_left_out else ""
    click.echo(f"{target}: {len(read.rows)} requests over {read.rows[-1].at_s / speed:,.0f} s{left_out}")


@sim.command()
@click.argument("name", type=click.Choice(["chunk-size", "batching", "memory", "thrown-away"]), required=False)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="The points.")
def figures(name: str | None, seed: int, as_json: bool) -> None:
    """Draw the papers' figures from this scheduler: shapes, on modelled step times. Takes some 20 s of CPU."""
    from schedtop.engine.sim.figures import FIGURES

    drawn = [make(seed) for known, make in FIGURES.items() if name in (None, known)]
    if as_json:
        click.echo(msgspec.json.encode(drawn).decode())
        return
    for figure in drawn:
        click.echo("\n".join(chart(figure)))
        click.echo()


def _in_words(summary: Summary) -> str:
    totals = (
        f"{summary.makespan_s:.1f} s, {summary.num_steps} steps, {summary.output_tokens_per_s:.0f} output tokens/s, "
        f"{summary.preemptions} preemptions, {summary.lost_tokens} tokens recomputed, {summary.refused} refused"
    )
    return _table([msgspec.structs.asdict(load) for load in summary.loads]) + "\n" + totals


def _table(rows: list[dict[str, Any]]) -> str:
    """Right-aligned columns under their names."""
    cells = [[_cell(name, value) for name, value in row.items()] for row in rows]
    widths = [max(len(name), *(len(row[i]) for row in cells)) for i, name in enumerate(rows[0])]
    lines = [list(rows[0]), *cells]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines)


def _cell(name: str, value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1f}" if name.startswith("itl_p50") else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and name not in KNOB_NAMES else str(value)
