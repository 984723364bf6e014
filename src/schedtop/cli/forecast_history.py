"""`schedtop forecast --history` and `--follow`: forecasts beside what then really happened.

What is kept and how it is judged is `control/past_forecasts.py`'s.
"""

import contextlib
import datetime
import time

import click
import msgspec

from schedtop.cli.engine import say_json, table, talk
from schedtop.control.client import Client
from schedtop.control.discovery import state_folder
from schedtop.control.errors import CommandRefused
from schedtop.control.messages import Ack, DumpSteps, EngineInfo, GetAudit, GetSnapshot, SnapshotReply
from schedtop.control.past_forecasts import FILE_NAME, HistoryFailed, PastForecast, PastForecasts, Seen, judge
from schedtop.engine.core import NUM_STEPS_KEPT
from schedtop.engine.errors import SchedtopError
from schedtop.engine.sim.outlook import Forecast, Outlook
from schedtop.engine.snapshot import NO_ROWS, StepRecord

MEASURES = (("TTFT p95", "ttft_p95_s"), ("ITL p99", "itl_p99_s"))
GRACE_S = 0.5


def _file() -> PastForecasts:
    return PastForecasts(state_folder() / FILE_NAME)


def keep(result: Forecast, info: EngineInfo, wall: float) -> tuple[int | None, Forecast]:
    """Store a forecast: its number; where that can't be done, the forecast says so itself."""
    try:
        return _file().keep(info.name, info.boot_id, wall, result), result
    except HistoryFailed as error:
        return None, msgspec.structs.replace(result, warnings=[*result.warnings, f"not kept for --history: {error}"])


async def read_seen(client: Client) -> tuple[str, Seen]:
    """What the engine can still tell, and which boot it is."""
    steps = await client.request(DumpSteps(count=NUM_STEPS_KEPT))
    audit = await client.request(GetAudit(limit=1000))
    reply = await client.request(GetSnapshot(viewport=NO_ROWS))
    assert isinstance(steps, Ack) and isinstance(audit, Ack) and isinstance(reply, SnapshotReply)
    seen = Seen(
        steps=msgspec.convert(steps.data["steps"], list[StepRecord]),
        audit=audit.data["rows"],
        mono=reply.update.snapshot.mono,
    )
    return client.welcome.info.boot_id, seen


def settle(connect: str | None) -> str:
    """Set what happened beside every forecast whose horizon is over; in words why not, if no engine could be asked."""
    history = _file()
    try:
        boot_id, seen = talk(connect, read_seen, read_only=True)
    except CommandRefused as error:
        return f"the engine doesn't tell its steps: {error}"
    except SchedtopError as error:
        return f"no engine was asked what happened: {error}"
    for past in history.open_ones(boot_id):
        if (verdict := judge(past, seen)) is not None:
            history.note(past.id, *verdict)
    return ""


def follow_up(connect: str | None, number: int, horizon_s: float) -> None:
    """Wait until a forecast's horizon is over and print what happened."""
    click.echo(f"waiting {horizon_s:g} s to see what happens ...", err=True)
    while True:
        time.sleep(horizon_s + GRACE_S)
        if reason := settle(connect):
            raise SchedtopError(reason)
        past = next((past for past in _file().newest(1000) if past.id == number), None)
        if past is None or past.became:
            break
        horizon_s = 1.0  # it was applied later than it was made: its time isn't over yet
    if past is not None:
        click.echo(history_in_words([past]))


def show_history(connect: str | None, limit: int, as_json: bool) -> None:
    """Print the newest forecasts, oldest of them first."""
    reason = settle(connect)
    kept = list(reversed(_file().newest(limit)))
    if as_json:
        say_json(kept)
        return
    click.echo(history_in_words(kept) if kept else "no forecast has been made yet")
    if reason and kept:
        click.echo(f"note: {reason}")


def history_in_words(kept: list[PastForecast]) -> str:
    """A row per forecast, and how far to trust them."""
    headings = ("when", "engine", "change", "became", *(f"{label}: foretold, was" for label, _ in MEASURES))
    lines = [table(headings, [_row(past) for past in kept], left=range(4))]
    for label, field in MEASURES:
        errors = sorted(abs(error) for past in kept if (error := _error(past, field)) is not None)
        if errors:
            lines.append(f"{label}: {len(errors)} judged, median error {errors[len(errors) // 2]:.0%}")
    return "\n".join(lines)


def _row(past: PastForecast) -> tuple[str, ...]:
    when = datetime.datetime.fromtimestamp(past.wall).astimezone().isoformat(sep=" ", timespec="seconds")[:19]
    changes = ", ".join(f"{name} {before} -> {after}" for name, (before, after) in past.foretold.changes.items())
    became = past.became or "not over yet, or its engine is gone"
    return (when, past.engine, changes, became, *(_pair(past, field) for _, field in MEASURES))


def _pair(past: PastForecast, field: str) -> str:
    expected = past.expected or past.foretold.then
    error = _error(past, field)
    told = f"{_ms(expected, field)}, {_ms(past.happened, field)}"
    return told if error is None else f"{told} ({error:+.0%})"


def _ms(outlook: Outlook | None, field: str) -> str:
    value = getattr(outlook, field) if outlook is not None else None
    return "-" if value is None else f"{value.mid * 1e3:,.0f} ms"


def _error(past: PastForecast, field: str) -> float | None:
    if past.expected is None or past.happened is None:
        return None
    expected, was = getattr(past.expected, field), getattr(past.happened, field)
    with contextlib.suppress(ZeroDivisionError):
        return None if expected is None or was is None else float(expected.mid / was.mid - 1)
    return None
