"""Each shipped playbook does good on situations drawn anew, and its cost is the one the documentation tells.

The situations are those of `docs/playbook_trials.py`; seeds and strengths here are others than the table's.
"""

import runpy
from pathlib import Path
from typing import Any

import pytest

from schedtop.control.playbook.report import Settings

TRIALS = runpy.run_path(str(Path(__file__).parents[3] / "docs" / "playbook_trials.py"))
SITUATIONS = TRIALS["SITUATIONS"]

LIMITS: dict[str, tuple[float, float]] = {
    "protect-itl": (0.7, 2.5),
    "stop-preemption-storm": (0.9, 2.0),
    "short-prompts-first": (0.5, 2.5),
    "priority-lane": (0.3, 1.5),
    "bulk-window": (0.85, 6.0),
    "find-budget": (0.8, 4.0),
    "shed-load": (0.5, 1.5),
    "drain-for-maintenance": (0.1, 1.0),
}
"""What is good becomes at most so many times as bad, what it costs at most so many times as dear."""
HIGHER_IS_BETTER = ("bulk ended", "output", "chats ended")
COUNTED_FROM_ZERO = ("recomputed", "refused")
"""Costs that nobody pays without the playbook."""


STEADY = [situation for situation in SITUATIONS if situation.playbook != "find-budget"]
SWEPT = [situation for situation in SITUATIONS if situation.playbook == "find-budget"]


@pytest.mark.parametrize(
    ("situation", "strength"),
    [(situation, (0.95, 1.1)[index % 2]) for index, situation in enumerate(STEADY)],
    ids=[f"{situation.playbook}-{index}" for index, situation in enumerate(STEADY)],
)
def test_it_does_good_and_costs_what_is_told(situation: Any, strength: float) -> None:
    trial = situation.play(seed=round(100 * strength), strength=strength)
    assert trial.reports, "its moment never came"
    assert all(report.settings in (Settings.KEPT, Settings.UNCHANGED) for report in trial.reports)
    check_figures(situation, trial)


@pytest.mark.parametrize("situation", SWEPT, ids=[situation.label for situation in SWEPT])
def test_a_sweep_on_a_live_load_mostly_finds_a_better_budget_and_else_its_check_takes_the_choice_back(
    situation: Any,
) -> None:
    """It compares moments of a load that changes meanwhile, so it may choose by chance."""
    trials = [situation.play(seed=seed, strength=strength) for seed, strength in ((110, 1.1), (95, 0.95), (7, 1.0))]
    settings = [trial.reports[-1].settings for trial in trials]
    assert set(settings) <= {Settings.KEPT, Settings.ROLLED_BACK} and settings.count(Settings.KEPT) >= 2
    for trial, end in zip(trials, settings, strict=True):
        if end is Settings.KEPT:
            check_figures(situation, trial)


def check_figures(situation: Any, trial: Any) -> None:
    """What is to get better does, and what it costs stays within what the documentation tells."""
    good, dear = LIMITS[situation.playbook]
    for figure in situation.good:
        assert worsening(figure, trial) <= good, figure.what
    for figure in situation.cost:
        if figure.what not in COUNTED_FROM_ZERO:
            assert worsening(figure, trial) <= dear, figure.what


def worsening(figure: Any, trial: Any) -> float:
    """How many times as bad it is with the playbook."""
    without, with_it = figure.measure(trial.without), figure.measure(trial.with_playbook)
    assert without is not None and with_it is not None
    ratio: float = with_it / without
    return 1 / ratio if figure.what in HIGHER_IS_BETTER else ratio
