# ruff: noqa: E501  (the table's sentences stand in one line)
"""What each shipped playbook brings and costs: it is played on simulated situations, beside the same ones without it.

`.venv/bin/python docs/playbook_trials.py` writes the table in `docs/playbooks.md` (some minutes of CPU); the tests of the
playbooks play single situations from here. Situations vary with a seed and with how strong the load is; nothing in a
playbook is tuned to one of them.
"""

import asyncio
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from schedtop.control.playbook.reader import load_playbook, parse_playbook
from schedtop.control.playbook.schema import Playbook
from schedtop.control.playbook.shipped import find_named
from schedtop.control.playbook.simulated import MIDNIGHT
from schedtop.control.playbook.trial import ScenarioTrial, try_on_scenario
from schedtop.engine.sim.scenario import Scenario, parse_scenario
from schedtop.engine.sim.summary import Summary

PAGE = Path(__file__).parent / "playbooks.md"
BEGIN, END = "<!-- trials: docs/playbook_trials.py -->\n", "<!-- end of trials -->\n"
DRAWS = ((1, 0.9), (2, 1.0), (3, 1.15), (4, 1.0), (5, 1.1))
"""Seed and strength of the load."""
HEAD = """
name = "{name}"
description = "{name}"
horizon_s = {horizon}
[engine]
num_kv_blocks = {blocks}
max_model_len = 32768
max_num_batched_tokens = 8192
max_num_seqs = 128
[step_time]
base_ms = 15
per_sequence_ms = 0.1
per_prefill_token_ms = 0.02
per_context_token_ms = 0.000001
"""
"""A middling accelerator: 15 ms and 0.1 ms per request for a step, 50,000 prompt tokens a second."""

Loads = Callable[[float], str]
Measure = Callable[[Summary], float | None]


class Figure(msgspec.Struct, frozen=True):
    """One number that the table shows without and with the playbook."""

    what: str
    unit: str
    measure: Measure


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """A playbook, a situation for it (the loads at a strength), and the numbers that tell good from cost."""

    playbook: str
    label: str
    loads: Loads
    good: Sequence[Figure]
    cost: Sequence[Figure]
    limits: str
    """Where it doesn't help, in a sentence."""
    blocks: int = 8000
    horizon_s: float = 60.0
    begins_at: float = MIDNIGHT
    once: bool = False
    after_s: float = 0.0
    """With `once`: when it is played."""
    instead: str = ""
    """Another playbook to compare with; without one it is nobody at the knobs."""

    def scenario(self, strength: float = 1.0) -> Scenario:
        """The situation with a load so many times as strong."""
        head = HEAD.format(name=self.playbook, horizon=self.horizon_s, blocks=self.blocks)
        return parse_scenario((head + self.loads(strength)).encode(), self.label)

    def play(self, seed: int, strength: float = 1.0) -> ScenarioTrial:
        """With the playbook, and without it."""
        trial = self._try(load_playbook(find_named(self.playbook)), seed, strength)
        if not self.instead:
            return trial
        other = self._try(parse_playbook(self.instead, "instead"), seed, strength)
        return msgspec.structs.replace(trial, without=other.with_playbook)

    def _try(self, playbook: Playbook, seed: int, strength: float) -> ScenarioTrial:
        scenario = self.scenario(strength)
        return asyncio.run(
            try_on_scenario(playbook, scenario, seed, once=self.once, after_s=self.after_s, begins_at=self.begins_at)
        )


def chats(rate: float, prompt: int = 300, output: int = 200) -> str:
    """People: medium prompts and answers with long tails."""
    return f"""
[[load]]
name = "chat"
rate_per_s = {rate:.3f}
prompt = {{ draw = "lognormal", median = {prompt}, sigma = 0.6, most = 4000 }}
output = {{ draw = "lognormal", median = {output}, sigma = 0.4, most = 1000 }}
"""


def documents(every: float, tokens: int, count: int = 1) -> str:
    """So many long prompts at a time, each so many seconds."""
    return "".join(_document(number, every, tokens) for number in range(count))


def _document(number: int, every: float, tokens: int) -> str:
    return f"""
[[load]]
name = "document{number}-"
at_s = 8.0
every_s = {every:.3f}
prompt = {{ draw = "uniform", low = {tokens // 2}, high = {tokens} }}
output = 60
"""


def bulk(rate: float) -> str:
    """Work that may wait."""
    return f"""
[[load]]
name = "bulk"
rate_per_s = {rate:.3f}
prompt = 600
output = {{ draw = "uniform", low = 100, high = 400 }}
priority = 5
"""


def urgent(rate: float) -> str:
    """Requests that may not wait."""
    return f"""
[[load]]
name = "urgent"
rate_per_s = {rate:.3f}
prompt = 200
output = 100
"""


def backlog(count: float) -> str:
    """Bulk work handed in at once."""
    return f"""
[[load]]
name = "bulk"
count = {count:.0f}
prompt = {{ draw = "uniform", low = 500, high = 1500 }}
output = {{ draw = "uniform", low = 50, high = 250 }}
"""


def of(load: str, field: str) -> Measure:
    """A number of one class of requests."""

    def measure(summary: Summary) -> float | None:
        values = [getattr(row, field) for row in summary.loads if row.load.startswith(load)]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    return measure


def share_served(load: str) -> Measure:
    """Percent of a class's requests that ended well within the situation."""

    def measure(summary: Summary) -> float | None:
        row = next(row for row in summary.loads if row.load == load)
        return 100.0 * row.num_finished / row.num_requests

    return measure


CHAT_ITL = Figure("chat ITL p99", "ms", of("chat", "itl_p99_ms"))
CHAT_TTFT = Figure("chat TTFT p95", "ms", of("chat", "ttft_p95_ms"))
CHAT_TTFT_P50 = Figure("chat TTFT p50", "ms", of("chat", "ttft_p50_ms"))
DOCUMENT_TTFT = Figure("document TTFT p50", "ms", of("document", "ttft_p50_ms"))
THROUGHPUT = Figure("output", "tokens/s", lambda summary: summary.output_tokens_per_s)
LOST = Figure("recomputed", "tokens", lambda summary: float(summary.lost_tokens))
REFUSED = Figure("refused", "requests", lambda summary: float(summary.refused))

CUT = Figure("cut off", "requests", lambda summary: float(sum(row.num_aborted for row in summary.loads)))
ABORT = "name: abort\nsteps:\n  - pause: abort\n"
_KNOBS = "[knobs]\n{}\n"

SITUATIONS = (
    Situation(
        playbook="protect-itl", label="long prompts arrive among chats",
        limits="Where the gaps don't come from prompts (many decodes, slow steps), a smaller budget only delays first tokens.",
        loads=lambda x: chats(4 * x) + documents(4 / x, 24_000),
        good=[CHAT_ITL], cost=[DOCUMENT_TTFT, CHAT_TTFT],
    ),
    Situation(
        playbook="stop-preemption-storm", label="long answers, a pool too small for them",
        limits="It throws nothing away, but the pool is no larger: who waits, waits longer.", blocks=1500,
        loads=lambda x: chats(3 * x, prompt=400, output=600), horizon_s=90.0,
        good=[LOST, CHAT_ITL], cost=[CHAT_TTFT, THROUGHPUT],
    ),
    Situation(
        playbook="short-prompts-first", label="several long documents at once among chats",
        limits="With a single long prompt at a time there is nothing to cap; where a tenth of all prompts are long, its check undoes it.",
        loads=lambda x: chats(6 * x, output=100) + documents(10 / x, 28_000, count=4),
        good=[CHAT_TTFT], cost=[DOCUMENT_TTFT, CHAT_ITL], horizon_s=90.0,
    ),
    Situation(
        playbook="priority-lane", label="urgent requests while bulk work fills every slot",
        limits="Where all requests have one priority it changes nothing; thrown-out bulk work is computed again.",
        loads=lambda x: _KNOBS.format("max_num_seqs = 24") + bulk(9 * x) + urgent(0.7 * x), horizon_s=90.0,
        good=[Figure("urgent TTFT p95", "ms", of("urgent", "ttft_p95_ms"))],
        cost=[Figure("bulk TTFT p50", "ms", of("bulk", "ttft_p50_ms")), LOST],
    ),
    Situation(
        playbook="bulk-window", label="a backlog of bulk work when the night begins",
        limits="With a day's settings at the ceiling already there is nothing to gain.", begins_at=MIDNIGHT + 21.995 * 3600,
        loads=lambda x: _KNOBS.format("max_num_batched_tokens = 512\nmax_num_seqs = 16") + backlog(1000 * x) + chats(0.3),
        good=[Figure("bulk ended", "%", share_served("bulk")), THROUGHPUT], horizon_s=120.0,
        cost=[Figure("bulk ITL p99", "ms", of("bulk", "itl_p99_ms"))],
    ),
    Situation(
        playbook="find-budget", label="the budget is too large",
        limits="While it tries, some values are bad; on a load that changes within a minute it compares moments, not values, and its check undoes the choice.", once=True, after_s=20.0, horizon_s=240.0,
        loads=lambda x: chats(4 * x) + documents(4 / x, 24_000),
        good=[CHAT_ITL], cost=[DOCUMENT_TTFT, CHAT_TTFT],
    ),
    Situation(
        playbook="find-budget", label="the budget is too small",
        limits="As above.", once=True, after_s=20.0, horizon_s=240.0,
        loads=lambda x: _KNOBS.format("max_num_batched_tokens = 192") + chats(6 * x) + documents(4 / x, 12_000),
        good=[CHAT_TTFT, DOCUMENT_TTFT], cost=[CHAT_ITL],
    ),
    Situation(
        playbook="shed-load", label="a third more arrives than can be served",
        limits="Clients that retry at once come again; a short burst would have been served without refusing anybody.",
        loads=lambda x: _KNOBS.format("max_num_seqs = 24") + chats(9 * x), horizon_s=120.0,
        good=[CHAT_TTFT, CHAT_TTFT_P50], cost=[REFUSED, THROUGHPUT],
    ),
    Situation(
        playbook="drain-for-maintenance", label="the engine has to stop; otherwise: pause with mode abort",
        limits="Requests that wait are kept, not served: send them elsewhere. One answer that takes longer than two minutes undoes the drain.", once=True, after_s=20.0,
        loads=lambda x: chats(4 * x) + documents(8 / x, 12_000), instead=ABORT, horizon_s=60.0,
        good=[CUT], cost=[Figure("chats ended", "", of("chat", "num_finished"))],
    ),
)  # fmt: skip


def main() -> None:
    """Play everything and write the table into the page."""
    rows = [_row(situation) for situation in SITUATIONS]
    head = ("playbook", "situation", "good", "cost", "kept", "where it doesn't help")
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ("---",) * len(head), *rows))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + BEGIN + "\n" + table + "\n" + END + after, encoding="utf-8")


def _row(situation: Situation) -> tuple[str, ...]:
    trials = [situation.play(seed, strength) for seed, strength in DRAWS]
    kept = sum(any(report.settings == "kept" for report in trial.reports) for trial in trials)
    print(situation.playbook, situation.label, file=sys.stderr)
    return (
        f"`{situation.playbook}`", situation.label, _cell(situation.good, trials), _cell(situation.cost, trials),
        f"{kept} of {len(trials)}", situation.limits,
    )  # fmt: skip


def _cell(figures: Sequence[Figure], trials: Sequence[ScenarioTrial]) -> str:
    """Medians over the draws, without and with."""
    parts = []
    for figure in figures:
        without, with_it = (
            _median([figure.measure(summary) for summary in summaries])
            for summaries in ([t.without for t in trials], [t.with_playbook for t in trials])
        )
        parts.append(f"{figure.what} {without} → {with_it} {figure.unit}".rstrip())
    return "; ".join(parts)


def _median(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):,.0f}" if known else "-"


if __name__ == "__main__":
    main()
