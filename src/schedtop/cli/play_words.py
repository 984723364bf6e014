"""How `schedtop play` words plans, forecasts and trials. Reads structs, gives lines."""

from collections.abc import Iterator

from schedtop.cli.engine import table
from schedtop.control.playbook.events import report_in_words
from schedtop.control.playbook.report import PlannedStep, changes_in_words
from schedtop.control.playbook.trial import ScenarioTrial
from schedtop.engine.sim.outlook import Forecast, Range
from schedtop.engine.sim.summary import LoadSummary

_FORECAST: tuple[tuple[str, str, float], ...] = (
    ("TTFT p95 ms", "ttft_p95_s", 1e3),
    ("ITL p99 ms", "itl_p99_s", 1e3),
    ("tokens/s", "output_tokens_per_s", 1.0),
    ("preemptions", "preemptions", 1.0),
)


def plan_lines(planned: list[PlannedStep]) -> list[str]:
    """A dry run, step by step."""
    lines = []
    for number, step in enumerate(planned, 1):
        more = "; ".join(filter(None, (changes_in_words(step.changes) if step.changes else "", step.detail)))
        lines.append(f"{number}. {step.what}  [{step.verdict}{': ' if more else ''}{more}]")
        if step.forecast is not None:
            lines += [f"     {line}" for line in forecast_lines(step.forecast)]
    return lines


def forecast_lines(forecast: Forecast) -> Iterator[str]:
    """Now and then side by side, on one line, and what it rests on."""
    parts = [
        f"{label} {_value(getattr(forecast.now, name), scale)} -> {_value(getattr(forecast.then, name), scale)}"
        for label, name, scale in _FORECAST
    ]
    yield f"forecast over {forecast.horizon_s:g} s, {forecast.num_draws} draws: {', '.join(parts)}"
    for warning in forecast.warnings:
        yield f"note: {warning}"


def _value(value: Range | None, scale: float) -> str:
    return "-" if value is None else f"{value.mid * scale:.3g}"


def trial_lines(trial: ScenarioTrial) -> list[str]:
    """What the playbook did, and each class of load without and with it."""
    lines = [report_in_words(report) for report in trial.reports] or [f"{trial.playbook}: its moment never came"]
    rows = []
    for before, after in zip(trial.without.loads, trial.with_playbook.loads, strict=True):
        rows += [_row(before.load, "without", before), _row("", "with", after)]
    head = ("load", "", "TTFT p50", "TTFT p95", "ITL p50", "ITL p99", "ended", "refused", "tokens")
    totals = [
        f"{name}: {summary.output_tokens_per_s:.0f} tokens/s, {summary.preemptions} preemptions, "
        f"{summary.lost_tokens} tokens thrown away, {summary.refused} refused"
        for name, summary in (("without", trial.without), ("with", trial.with_playbook))
    ]
    return [*lines, "", table(head, rows, left=(0, 1)), "(times in ms)", *totals]


def _row(load: str, label: str, summary: LoadSummary) -> tuple[str, ...]:
    times = (summary.ttft_p50_ms, summary.ttft_p95_ms, summary.itl_p50_ms, summary.itl_p99_ms)
    counts = (summary.num_finished, summary.num_refused, summary.output_tokens)
    return (load, label, *("-" if t is None else f"{t:,.0f}" for t in times), *(f"{count:,}" for count in counts))
