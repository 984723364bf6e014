"""`schedtop sim`: situations run through the engine's own scheduler on a virtual clock. No engine is needed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import msgspec

from schedtop.cli.values import KNOB_ASSIGNMENT, as_changes
from schedtop.engine.knobs import KNOB_NAMES, KnobValue
from schedtop.engine.sim import paper as tables
from schedtop.engine.sim.scenario import load_scenario, shipped_scenarios
from schedtop.engine.sim.simulate import Simulation
from schedtop.engine.sim.summary import Summary, summarise

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
    knobs = loaded.start_knobs(as_changes(changes))
    simulation = Simulation(
        loaded.config(), knobs, loaded.step_time.model(), loaded.arrivals(seed), loaded.knob_changes()
    )
    summary = summarise(simulation.run(loaded.horizon_s))
    click.echo(msgspec.json.encode(summary).decode() if as_json else _in_words(summary))


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
