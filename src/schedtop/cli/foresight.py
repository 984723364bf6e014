"""`schedtop model` and `schedtop forecast`: what a knob will do, before it is turned.

The forecast runs here, in this process and at low priority, never in the engine's.
"""

import contextlib
import os
import time
from collections.abc import Sequence

import click
import msgspec

from schedtop.cli.engine import DURATION, connect_option, json_option, say_json, table, talk
from schedtop.cli.forecast_basis import Happened, from_file
from schedtop.cli.forecast_history import follow_up, keep, show_history
from schedtop.cli.values import KNOB_ASSIGNMENT, as_changes
from schedtop.control.client import Client
from schedtop.control.messages import Ack, EngineInfo, GetSnapshot, GetState, GetStepModel, SnapshotReply
from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import KnobValue
from schedtop.engine.perf import PerfStats, perf_stats
from schedtop.engine.sim.forecast import forecast
from schedtop.engine.sim.outlook import Forecast, Outlook, Range
from schedtop.engine.sim.state import EngineState
from schedtop.engine.sim.step_model import FittedModel
from schedtop.engine.snapshot import NO_ROWS

_NICE = 10


@click.command()
@connect_option
@json_option
@click.option("--budget-for", type=DURATION, metavar="DURATION", help="Also the token budget for steps this long.")
def model(connect: str | None, as_json: bool, budget_for: float | None) -> None:
    """Show the step-time model, fitted from live steps, and the rates of the last step."""
    if budget_for is not None and budget_for <= 0:
        raise click.UsageError("--budget-for 0 is no step time: give one above 0, such as 50ms")
    fitted, perf, ceiling = talk(connect, _read_model_and_perf, read_only=True)
    if as_json:
        say_json({"fitted": fitted, "last_step": perf})
        return
    coefficients = fitted.model
    click.echo(
        f"step = {coefficients.base_s * 1e3:.3f} ms + {coefficients.per_sequence_s * 1e3:.4f} ms per sequence "
        f"+ {coefficients.per_prefill_token_s * 1e3:.5f} ms per prefill token "
        f"+ {coefficients.per_context_token_s * 1e6:.5f} µs per context token"
    )
    click.echo(
        f"from {fitted.num_samples} steps: R² {fitted.r_squared:.3f}, typical error {fitted.residual_s * 1e3:.2f} ms"
    )
    spans = (fitted.sequences_seen, fitted.prefill_tokens_seen, fitted.context_tokens_seen)
    sequences, prefill, context = (f"{low}-{high}" for low, high in spans)
    click.echo(f"seen: {sequences} sequences, {prefill} prefill tokens, {context} context tokens")
    if perf is not None:
        click.echo(
            f"last step: {perf.forward_s * 1e3:.1f} ms forward, {perf.schedule_s * 1e3:.2f} ms planning, "
            f"{perf.update_s * 1e3:.2f} ms taking the result; {perf.gflops_per_s:.1f} GFLOP/s, "
            f"{perf.gbytes_per_s:.1f} GB/s by model arithmetic"
        )
    if budget_for is not None:
        click.echo(f"budget for {budget_for * 1e3:g} ms: {_budget(fitted, budget_for, ceiling)}")


def _budget(fitted: FittedModel, step_s: float, ceiling: int) -> str:
    num_sequences = fitted.sequences_seen[1]
    try:
        budget = fitted.model.budget_for(step_s, num_sequences)
    except ValueError as error:
        return str(error)
    wanted = budget + num_sequences
    if 0 < ceiling < wanted:
        return f"{ceiling} tokens, the ceiling of max_num_batched_tokens here (the model would allow {wanted})"
    most = fitted.prefill_tokens_seen[1]
    beyond = f"; extrapolated: no step with more than {most} prefill tokens was seen" if budget > most else ""
    return f"{wanted} tokens, beside {num_sequences} decoding requests{beyond}"


@click.command(name="forecast")
@connect_option
@json_option
@click.option("--set", "changes", type=KNOB_ASSIGNMENT, multiple=True, help="The change to try.")
@click.option("--horizon", type=DURATION, default=30.0, show_default="30s", help="How far to look ahead.")
@click.option("--draws", type=click.IntRange(1, 64), default=8, show_default=True, help="Futures drawn at most.")
@click.option("--cpu", type=DURATION, default=1.5, show_default="1.5s", help="CPU time after which no more are drawn.")
@click.option("--from", "source", metavar="FILE|NAME", help="A recording, a scenario file or a shipped scenario.")
@click.option("--at", type=DURATION, help="With --from: the moment to look ahead from.")
@click.option("--seed", type=int, help="With a scenario: draw another load than the file's.")
@click.option("--starts", is_flag=True, help="Also when each waiting request will start.")
@click.option("--follow", is_flag=True, help="Wait until the horizon is over, and tell what happened.")
@click.option("--history", is_flag=True, help="Past forecasts beside what then happened.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="With --history.")
def forecast_command(
    connect: str | None, as_json: bool, changes: Sequence[tuple[str, KnobValue]], horizon: float, draws: int,
    cpu: float, source: str | None, at: float | None, seed: int | None, starts: bool, follow: bool, history: bool,
    limit: int,
) -> None:  # fmt: skip
    """Run the engine's own scheduler on from its live state, with the knobs as they are and as they would be."""
    if history:
        show_history(connect, limit, as_json)
        return
    if not changes and not starts:
        raise click.UsageError("name a change to try with --set, or ask for --starts or --history")
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    basis = from_file(source, at, seed, horizon) if source is not None else None
    if basis is not None:
        state, fitted = basis.state, basis.fitted
    else:
        state, fitted, info = talk(connect, _read_both, read_only=True)
    wall = time.time()
    result = forecast(state, fitted, as_changes(changes), horizon_s=horizon, max_draws=draws, cpu_limit_s=cpu)
    happened = basis.happens(as_changes(changes), result.horizon_s) if basis is not None else None
    number = None
    if basis is None and changes:
        number, result = keep(result, info, wall)
    if as_json:
        say_json(result)
    else:
        click.echo(in_words(result, happened, starts))
    if follow and number is not None:
        follow_up(connect, number, result.horizon_s)


async def read_model(client: Client) -> FittedModel:
    """The engine's fitted model. Raises `SchedtopError` while there isn't one."""
    ack = await client.request(GetStepModel())
    assert isinstance(ack, Ack)
    fitted = msgspec.convert(ack.data["fitted"], FittedModel | None)
    if fitted is None:
        raise SchedtopError("too few steps seen to model a step's time; let the engine work for a while")
    return fitted


async def read_state(client: Client) -> EngineState:
    """The engine's whole scheduling state."""
    ack = await client.request(GetState())
    assert isinstance(ack, Ack)
    return msgspec.convert(ack.data["state"], EngineState)


async def _read_model_and_perf(client: Client) -> tuple[FittedModel, PerfStats | None, int]:
    """Model, rates of the last step, and the ceiling of the token budget."""
    fitted, info = await read_model(client), client.welcome.info
    reply = await client.request(GetSnapshot(viewport=NO_ROWS))
    assert isinstance(reply, SnapshotReply)
    last_step = reply.update.snapshot.last_step
    perf = perf_stats(info.shape, last_step) if info.shape and last_step else None
    return fitted, perf, info.max_num_batched_tokens


async def _read_both(client: Client) -> tuple[EngineState, FittedModel, EngineInfo]:
    return await read_state(client), await read_model(client), client.welcome.info


def in_words(result: Forecast, happened: Happened | None = None, with_starts: bool = False) -> str:
    """Both outlooks side by side; what happened, where that is known; when who starts."""
    outlooks = [result.now] + [result.then] * bool(result.changes) + ([happened.outlook] if happened else [])
    headings = ["as it is"] + ["as it would be"] * bool(result.changes) + ([happened.heading] if happened else [])
    rows = [
        (label, unit, *(_cell(getattr(outlook, name), scale) for outlook in outlooks))
        for label, unit, name, scale in _MEASURES
    ]
    changes = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in result.changes.items())
    lines = [
        f"next {result.horizon_s:g} s" + (f" with {changes}" if changes else ""),
        table(("", "", *headings), rows, left=(0, 1)),
        f"{result.num_draws} draws of the future, {result.cpu_s:.1f} s of CPU; ranges are over the draws",
        f"arrivals: {result.arrivals}",
    ]
    if with_starts:
        started = [(start.request_id, _cell(start.now, 1.0), _cell(start.then, 1.0)) for start in result.starts]
        lines.append(table(("starts in s", "as it is", "as it would be"), started) if started else "nobody waits")
    return "\n".join(lines + [f"note: {warning}" for warning in result.warnings])


_MEASURES: tuple[tuple[str, str, str, float], ...] = (
    ("TTFT p50", "ms", "ttft_p50_s", 1e3),
    ("TTFT p95", "ms", "ttft_p95_s", 1e3),
    ("ITL p50", "ms", "itl_p50_s", 1e3),
    ("ITL p99", "ms", "itl_p99_s", 1e3),
    ("output", "tokens/s", "output_tokens_per_s", 1.0),
    ("preemptions", "", "preemptions", 1.0),
    ("tokens thrown away", "", "lost_tokens", 1.0),
    ("requests ended", "", "finished", 1.0),
    ("queue empty after", "s", "queue_drained_s", 1.0),
)
assert {name for _, _, name, _ in _MEASURES} == set(Outlook.__struct_fields__)


def _cell(value: Range | None, scale: float) -> str:
    if value is None:
        return "-"
    mid, low, high = (f"{part * scale:,.3g}" if part * scale < 100 else f"{part * scale:,.0f}" for part in
                      (value.mid, value.low, value.high))  # fmt: skip
    return mid if low == high else f"{mid} ({low} to {high})"
