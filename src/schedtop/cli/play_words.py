"""How `schedtop play` words trials. Reads structs, gives lines."""

from schedtop.cli.engine import table
from schedtop.control.playbook.events import report_in_words
from schedtop.control.playbook.trial import ScenarioTrial
from schedtop.engine.sim.summary import LoadSummary


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
