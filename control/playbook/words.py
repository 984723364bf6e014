"""How a playbook's plan and its forecasts are worded, on the command line and on the screen."""

from collections.abc import Iterator

from schedtop.control.playbook.report import PlannedStep, changes_in_words
from schedtop.engine.sim.outlook import Forecast, Range

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
