"""`schedtop bench scheduler`: what is measured is what its rows say, and a peer that can't run is named plainly."""

import json
import sys

import pytest
from click.testing import CliRunner

from schedtop.cli.bench_scheduler import Cost
from schedtop.cli.main import cli
from schedtop.engine.sched.check import find_faults
from schedtop.engine.sim.bench_scheduler import OurScheduler, Workload


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def make_settled(workload: Workload) -> OurScheduler:
    settled = OurScheduler(workload)
    settled.close()  # gives frozen objects back to the collector; it goes on working
    return settled


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli, ["bench", "scheduler", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_settled_workload_decodes_with_all_it_names(is_async: bool) -> None:
    ours = make_settled(Workload(running=8, waiting=30, is_async=is_async))
    assert len(ours.steps(20)) == 20
    sched = ours._sched
    assert sched.last_plan is not None
    assert sched.last_plan.num_decode_tokens == sched.last_plan.total_num_scheduled_tokens == 8
    assert len(sched.running) == 8 and sched.num_waiting == 30
    assert find_faults(sched) == []


def test_a_prefill_takes_the_rest_of_the_budget_beside_the_decodes(is_async: bool) -> None:
    workload = Workload(running=8, waiting=5, is_async=is_async, has_prefill=True)
    ours = make_settled(workload)
    ours.steps(3)
    plan = ours._sched.last_plan
    assert plan is not None
    assert plan.num_decode_tokens == 8 and plan.total_num_scheduled_tokens == workload.budget


def test_with_churn_requests_arrive_and_end_at_the_same_rate(is_async: bool) -> None:
    ours = make_settled(Workload(running=8, waiting=20, is_async=is_async, has_churn=True))
    before = sum(ours._sched.stats.finished.values())
    ours.steps(40)
    assert sum(ours._sched.stats.finished.values()) - before >= 25
    assert 6 <= len(ours._sched.running) <= 8
    assert 18 <= ours._sched.num_waiting <= 24


def test_operations_on_the_queue_do_what_is_timed() -> None:
    ours = make_settled(Workload(running=4, waiting=50, policy="priority"))
    assert len(ours.aborts(10)) == 10
    assert ours._sched.num_waiting == 40
    ours.priority_changes(200)
    assert {request.priority for request in ours._sched.waiting} == {1}
    assert find_faults(ours._sched) == []


def test_costs_are_median_and_least_in_microseconds() -> None:
    assert Cost.of([3e-6, 1e-6, 9e-6]) == Cost(median_us=pytest.approx(3.0), min_us=pytest.approx(1.0))


@pytest.fixture
def short_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schedtop.cli.bench_scheduler.NUM_QUEUED", 40)
    monkeypatch.setattr("schedtop.cli.bench_scheduler.NUM_QUEUED_FOR_CHURN", 20)


@pytest.mark.usefixtures("short_queues")
def test_json_has_a_row_for_each_case() -> None:
    status, output, _ = run("--running", "4", "--rounds", "1", "--steps", "2", "--json")
    report = json.loads(output)
    assert status == 0
    assert report["vllm_version"] is None
    assert len(report["rows"]) == 11
    assert {row["what"] for row in report["rows"]} >= {"sync", "async + prefill", "abort a waiting one"}
    assert all(row["ours"]["min_us"] > 0 and row["ratio"] is None for row in report["rows"])


@pytest.mark.usefixtures("short_queues")
def test_table_names_its_columns_and_unit() -> None:
    status, output, _ = run("--running", "2", "--rounds", "1", "--steps", "1")
    lines = output.splitlines()
    assert status == 0
    assert "Microseconds of CPU time" in lines[0] and lines[1].split()[:3] == ["running", "waiting", "policy"]
    assert len(lines) == 2 + 11


def test_a_python_that_does_not_exist_is_named() -> None:
    status, _, error = run("--vllm-python", "/nowhere/python")
    assert status == 1
    assert error.startswith("schedtop: error: /nowhere/python can't be run (No such file or directory)")


def test_a_python_without_vllm_says_so() -> None:
    status, _, error = run("--vllm-python", sys.executable)
    assert status == 1
    assert "No module named 'vllm'" in error


def test_too_few_requests_are_refused() -> None:
    status, _, error = run("--running", "1")
    assert status == 2
    assert "1 is too few to measure" in error
