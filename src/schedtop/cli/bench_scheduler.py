"""`schedtop bench scheduler`: what schedule() and update_from_output() cost, beside vLLM's own where there is one.

Rounds of the two alternate, each in a process of its own, and CPU time is counted, so that what else the machine does
touches both alike.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import click
import msgspec

from schedtop.control.vllm.peer import VllmProcess, VllmScheduler
from schedtop.engine.sim.bench_scheduler import OurScheduler, Peer, Workload

DECODES = (64, 256, 1024)
NUM_QUEUED = 10_000
NUM_QUEUED_FOR_CHURN = 1000


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A workload and what is timed under it."""

    workload: Workload
    what: str
    measure: Callable[[Peer, int], list[float]] = lambda peer, count: peer.steps(count)
    is_step: bool = True
    """False: a single operation is timed."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of CPU time of one step (or one operation)."""

    median_us: float
    min_us: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Cost":
        """Of all rounds together."""
        return cls(median_us=statistics.median(seconds) * 1e6, min_us=min(seconds) * 1e6)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One workload measured."""

    what: str
    running: int
    waiting: int
    policy: str
    ours: Cost
    per_running_us: float | None
    """Ours, of the median, per running request; None where the step isn't what is measured."""
    vllm: Cost | None = None
    ratio: float | None = None
    """vLLM's median over ours."""
    ratio_of_minima: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured, and against what."""

    rounds: int
    steps_per_round: int
    vllm_version: str | None
    rows: list[Row]


@click.command()
@click.option(
    "--vllm-python", metavar="PY", help="A Python that has vLLM: the same on vLLM's scheduler, and the ratio."
)
@click.option("--running", type=int, multiple=True, metavar="N", help="Decoding requests (default: 64, 256 and 1024).")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Alternating rounds.")
@click.option("--steps", type=click.IntRange(1, 60), default=20, show_default=True, help="Steps per round.")
@click.option("--json", "as_json", is_flag=True, help="Unrounded values.")
def scheduler(vllm_python: str | None, running: tuple[int, ...], rounds: int, steps: int, as_json: bool) -> None:
    """Time schedule() and update_from_output() per step, by decodes, queue, prefill and arrivals."""
    if running and min(running) < 2:
        raise click.BadParameter(f"{min(running)} is too few to measure: 2 at least", param_hint="--running")
    cases = list(_cases(running or DECODES))
    with ExitStack() as stack:
        process = stack.enter_context(VllmProcess(vllm_python)) if vllm_python else None
        version = process.version if process else None
        if not as_json:
            click.echo(_heading(version))
        rows = []
        for case in cases:
            rows.append(_measure(case, rounds, steps, process))
            if not as_json:
                click.echo(_line(rows[-1]))
    if as_json:
        report = Report(rounds=rounds, steps_per_round=steps, vllm_version=version, rows=rows)
        click.echo(msgspec.json.encode(report))


def _cases(decodes: Sequence[int]) -> Iterable[Case]:
    """All that is measured, in the order of the table."""
    for running in decodes:
        for is_async in (False, True):
            for waiting in (0, NUM_QUEUED):
                yield _steps(Workload(running=running, waiting=waiting, is_async=is_async))
            yield _steps(Workload(running=running, waiting=NUM_QUEUED, is_async=is_async, has_prefill=True))
            yield _steps(Workload(running=running, waiting=NUM_QUEUED_FOR_CHURN, is_async=is_async, has_churn=True))
    for policy in ("fcfs", "priority"):
        queue = Workload(running=decodes[0], waiting=NUM_QUEUED, policy=policy)
        yield Case(workload=queue, what="abort a waiting one", measure=_aborts, is_step=False)
    yield Case(workload=queue, what="change a priority", measure=_priority_changes, is_step=False)


def _steps(workload: Workload) -> Case:
    return Case(workload=workload, what=workload.label)


def _aborts(peer: Peer, count: int) -> list[float]:
    return peer.aborts(count)


def _priority_changes(peer: Peer, count: int) -> list[float]:
    return peer.priority_changes(count)


def _measure(case: Case, rounds: int, count: int, process: VllmProcess | None) -> Row:
    """Measure one case, rounds of both in turn."""
    workload = case.workload
    ours = OurScheduler(workload)
    theirs = VllmScheduler(process, workload) if process else None
    our_seconds: list[float] = []
    their_seconds: list[float] = []
    for _ in range(rounds):
        our_seconds += case.measure(ours, count)
        if theirs is not None:
            their_seconds += case.measure(theirs, count)
    ours.close()
    cost = Cost.of(our_seconds)
    their_cost = Cost.of(their_seconds) if their_seconds else None
    return Row(
        what=case.what,
        running=workload.running,
        waiting=workload.waiting,
        policy=workload.policy,
        ours=cost,
        per_running_us=cost.median_us / workload.running if case.is_step else None,
        vllm=their_cost,
        ratio=their_cost.median_us / cost.median_us if their_cost else None,
        ratio_of_minima=their_cost.min_us / cost.min_us if their_cost else None,
    )


def _heading(version: str | None) -> str:
    columns = ("", "running", "waiting", "policy", "ours", "per running", f"vLLM {version or ''}", "ratio")
    return "Microseconds of CPU time: median (least)\n" + _LAYOUT.format(*columns).rstrip()


def _line(row: Row) -> str:
    per_running = f"{row.per_running_us:.2f}" if row.per_running_us is not None else ""
    ratio = f"{row.ratio:.1f} ({row.ratio_of_minima:.1f})" if row.ratio is not None else ""
    theirs = _cost(row.vllm) if row.vllm else ""
    columns = (row.what, row.running, row.waiting, row.policy, _cost(row.ours), per_running, theirs, ratio)
    return _LAYOUT.format(*columns).rstrip()


def _cost(cost: Cost) -> str:
    return f"{cost.median_us:,.0f} ({cost.min_us:,.0f})"


_LAYOUT = "{:24}{:>8}{:>8}  {:8}{:>16}{:>12}{:>20}{:>15}"
