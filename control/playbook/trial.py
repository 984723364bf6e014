"""A playbook tried without an engine: against a scenario, beside the same scenario without it; against a recording,
where it can only be said when it would have begun and what it would have done.
"""

from collections.abc import Callable

import msgspec

from schedtop.control.errors import Disconnected
from schedtop.control.playbook.events import OnEvent
from schedtop.control.playbook.expr import Condition, parse_duration
from schedtop.control.playbook.plan import plan
from schedtop.control.playbook.recorded import RecordedEngine
from schedtop.control.playbook.repeat import keep_running
from schedtop.control.playbook.report import PlannedStep, Report
from schedtop.control.playbook.runner import nobody, schedule_of
from schedtop.control.playbook.schema import Playbook
from schedtop.control.playbook.simulated import MIDNIGHT, simulated
from schedtop.control.playbook.target import Target
from schedtop.control.recorder import Recording
from schedtop.engine.sim.scenario import Scenario
from schedtop.engine.sim.summary import Summary, summarise


class ScenarioTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario, drawn once, with the playbook and without."""

    playbook: str
    scenario: str
    reports: list[Report]
    """Of the runs that began."""
    without: Summary
    with_playbook: Summary


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """When a playbook would have begun in a recording, and its dry run there."""

    step: int
    wall: float
    after_s: float
    """Seconds after the recording's beginning."""
    planned: list[PlannedStep]


async def try_on_scenario(
    playbook: Playbook,
    scenario: Scenario,
    seed: int | None = None,
    *,
    once: bool = False,
    after_s: float = 0.0,
    begins_at: float = MIDNIGHT,
    on_event: OnEvent = nobody,
) -> ScenarioTrial:
    """Play it on a scenario up to its end, in virtual time, from `after_s` seconds into it."""
    reports: list[Report] = []
    with simulated(scenario, seed, begins_at) as (engine, target):
        await target.begin()
        await target.wait_until(after_s)
        await keep_running(playbook, target, once=once, on_event=on_event, on_report=reports.append)
        summary = engine.finish()
    return ScenarioTrial(
        playbook=playbook.name,
        scenario=scenario.name,
        reports=reports,
        without=without_playbook(scenario, seed),
        with_playbook=summary,
    )


def without_playbook(scenario: Scenario, seed: int | None = None) -> Summary:
    """The same draw of the scenario with nobody at the knobs."""
    simulation = scenario.simulation(seed=seed)
    try:
        return summarise(simulation.run(scenario.horizon_s))
    finally:
        simulation.core.shutdown()


async def try_on_recording(
    playbook: Playbook, recording: Recording, on_moment: Callable[[Moment], None] = nobody
) -> list[Moment]:
    """Every moment of a recording at which the playbook would have begun.

    What its changes would have done can't be known from a recording, so nothing is checked; the next moment is looked
    for after the cooldown.
    """
    engine = RecordedEngine(recording)
    target, moments = Target(engine), []
    hours = schedule_of(playbook)
    condition = Condition(playbook.when) if playbook.when is not None else None
    not_before = float("-inf")
    try:
        await target.begin()
        start = target.now
        while True:
            is_true = condition is None or condition.test(target.history).truth is True
            if is_true and target.now >= not_before and (hours is None or hours.is_open(target.snapshot.wall)):
                snapshot = target.snapshot
                moment = Moment(
                    step=snapshot.step,
                    wall=snapshot.wall,
                    after_s=target.now - start,
                    planned=await plan(playbook, target),
                )
                moments.append(moment)
                on_moment(moment)
                if condition is None:
                    return moments
                not_before = target.now + parse_duration(playbook.cooldown)
            await target.next_moment()
    except Disconnected:
        return moments
