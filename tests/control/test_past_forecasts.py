"""Forecasts are kept, and what then really happened is set beside them."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from schedtop.cli.foresight import forecast_command
from schedtop.control.messages import EngineInfo, EventBatch, SnapshotUpdate, Welcome
from schedtop.control.past_forecasts import MAX_KEPT, HistoryFailed, PastForecasts, Seen, judge
from schedtop.control.recorded_state import RecordedState
from schedtop.control.recorder import BadRecording, Recorded, Recording, RecordingWriter
from schedtop.engine.core import EngineCore
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sim.outlook import Forecast, Outlook, Range
from schedtop.engine.sim.scenario import load_scenario
from schedtop.engine.snapshot import StepRecord, Viewport


def outlook(itl_s: float) -> Outlook:
    """One with a token gap."""
    none, some = Range(0, 0, 0), Range(itl_s, itl_s, itl_s)
    return Outlook(
        ttft_p50_s=None, ttft_p95_s=None, itl_p50_s=some, itl_p99_s=some, output_tokens_per_s=none, preemptions=none,
        lost_tokens=none, finished=none, queue_drained_s=None,
    )  # fmt: skip


FORETOLD = Forecast(
    horizon_s=10.0, now=outlook(0.5), then=outlook(0.1), changes={"max_num_seqs": (8, 4)}, num_draws=3, cpu_s=0.2,
    warnings=[], mono=100.0,
)  # fmt: skip


@pytest.fixture
def history(tmp_path: Path) -> PastForecasts:
    return PastForecasts(tmp_path / "state" / "forecasts.sqlite")


@pytest.fixture
def steps() -> list[StepRecord]:
    """Steps from 95 s on, a tenth of a second apart, step 1 first: gaps of 0.2 s from 104 s on, of 0.4 s before."""
    simulation = load_scenario("slot-limited").simulation()
    records: list[StepRecord] = []
    simulation.watch(lambda core, record: records.append(record))
    simulation.run(5.0)
    made = []
    for number, record in enumerate(records[:300]):
        mono = 95.0 + number / 10
        values = {name: getattr(record, name) for name in StepRecord.__struct_fields__}
        gap = 0.2 if mono > 104 else 0.4
        made.append(StepRecord(**{**values, "step": number + 1, "mono": mono, "duration_s": 0.1, "itl": [(gap, 5)]}))
    return made


def turn(number: int, wall: float, step: int, after: dict[str, Any], outcome: str = "done") -> dict[str, Any]:
    """An audit row of knobs that were turned."""
    return {"id": number, "wall": wall, "boot_id": "b", "step": step, "change_id": number, "outcome": outcome,
            "after": after}  # fmt: skip


def kept(history: PastForecasts) -> Any:
    """A forecast made at wall time 1000, engine clock 100."""
    history.keep("e", "b", 1000.0, FORETOLD)
    (past,) = history.open_ones("b")
    return past


def test_a_change_that_was_not_made_is_judged_by_the_outlook_without_it(history, steps) -> None:
    verdict = judge(kept(history), Seen(steps=steps, audit=[turn(1, 990.0, 3, {"max_num_seqs": 4})], mono=124.0))
    assert verdict is not None and verdict[0] == "not applied"
    history.note(1, *verdict)
    (past,) = history.newest(5)
    assert past.expected == FORETOLD.now
    assert past.happened is not None and past.happened.itl_p99_s == Range(0.4, 0.4, 0.4)
    assert history.open_ones("b") == []


def test_a_change_that_was_made_is_judged_from_then_on_by_the_outlook_with_it(history, steps) -> None:
    rows = [turn(1, 1004.0, 92, {"max_num_seqs": 4})]
    verdict = judge(kept(history), Seen(steps=steps, audit=rows, mono=124.0))
    assert verdict is not None and verdict[0] == "applied"
    assert verdict[1] is not None and verdict[1].itl_p99_s == Range(0.2, 0.2, 0.2), "from 104 s to 114 s"


@pytest.mark.parametrize(
    "rows",
    [
        [turn(1, 1004.0, 92, {"max_num_seqs": 5})],
        [turn(1, 1004.0, 92, {"max_num_seqs": 4, "watermark": 0.1})],
        [turn(1, 1004.0, 92, {"max_num_seqs": 4}), turn(2, 1006.0, 120, {"max_num_seqs": 8}, "rolled back")],
    ],
)
def test_where_other_knobs_were_turned_nothing_is_compared(history, steps, rows) -> None:
    assert judge(kept(history), Seen(steps=steps, audit=rows, mono=124.0)) == ("other knobs turned", None)


def test_a_refused_change_is_none(history, steps) -> None:
    rows = [turn(0, 1004.0, 92, {"max_num_seqs": 4}, "refused")]
    verdict = judge(kept(history), Seen(steps=steps, audit=rows, mono=124.0))
    assert verdict is not None and verdict[0] == "not applied"


def test_a_horizon_that_is_not_over_is_judged_later_and_one_that_nobody_saw_never(history, steps) -> None:
    past = kept(history)
    assert judge(past, Seen(steps=steps, audit=[], mono=109.0)) is None
    assert judge(past, Seen(steps=steps[80:], audit=[], mono=124.0)) == ("not seen", None)


def test_an_idle_engine_is_judged_too(history, steps) -> None:
    verdict = judge(kept(history), Seen(steps=steps[:10], audit=[], mono=124.0))
    assert verdict is not None and verdict[1] is not None and verdict[1].itl_p99_s is None


def test_the_oldest_forecasts_go_first_and_the_file_is_private(history, monkeypatch) -> None:
    monkeypatch.setattr("schedtop.control.past_forecasts.MAX_KEPT", 5)
    for wall in range(8):
        history.keep("e", "b", float(wall), FORETOLD)
    assert [past.wall for past in history.newest(MAX_KEPT)] == [7, 6, 5, 4, 3]
    assert history.path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_no_database_is_named(history) -> None:
    history.path.parent.mkdir()
    history.path.write_text("no database, but long enough to be looked at as one " * 20)
    with pytest.raises(HistoryFailed, match=r"forecasts\.sqlite can't be used"):
        history.newest(1)


# ---- the command ------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> str:
    """Run `schedtop forecast`."""
    result = CliRunner().invoke(forecast_command, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_live_forecast_is_followed_up_and_stands_in_the_history(serve, brisk_runner, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    engine = serve(brisk_runner, num_kv_blocks=20_000, max_model_len=200_000, max_num_seqs=8)

    def load(core: EngineCore) -> None:
        for number in range(12):
            core.add_request(f"r{number}", [5] * 20, SamplingParams(max_tokens=150_000, ignore_eos=True))

    engine.loop.submit(load, lambda call: None)
    connect = ("--connect", str(engine.path))
    output = ""
    while "next 0.5 s" not in output:  # until enough steps were seen for a model
        run = CliRunner().invoke(
            forecast_command, [*connect, "--set", "max_num_seqs=4", "--horizon", "500ms", "--starts", "--follow"]
        )
        output = run.output
    assert "as it would be" in output and "starts in s" in output and "r8" in output
    history = json.loads(invoke(*connect, "--history", "--json"))
    assert history[-1]["became"] == "not applied"
    assert history[-1]["happened"]["itl_p99_s"]["mid"] > 0
    assert "ITL p99: 1 judged, median error" in invoke(*connect, "--history")


def test_history_is_shown_without_an_engine(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert invoke("--history") == "no forecast has been made yet\n"
    PastForecasts(tmp_path / "schedtop" / "forecasts.sqlite").keep("e", "b", 1000.0, FORETOLD)
    shown = invoke("--history")
    assert "max_num_seqs 8 -> 4" in shown and "not over yet, or its engine is gone" in shown
    assert "note: no engine was asked what happened" in shown


@pytest.mark.parametrize("name", ["slot-limited", "preemption-storm"])
def test_a_forecast_from_a_scenario_stands_beside_what_the_scenario_goes_on_with(name: str) -> None:
    seed = str(random.randrange(1000))
    shown = invoke("--from", name, "--set", "max_num_seqs=6", "--horizon", "5s", "--at", "8s", "--seed", seed)
    assert "as it goes then" in shown and "next 5 s with max_num_seqs" in shown


def test_without_a_change_something_else_must_be_asked_for() -> None:
    result = CliRunner().invoke(forecast_command, [])
    assert result.exit_code == 2 and "--set" in result.output and "--history" in result.output


# ---- from a recording -------------------------------------------------------------------------------------------


@pytest.fixture
def recording(tmp_path: Path) -> tuple[Path, dict[float, Any]]:
    """Thirty seconds of a scenario as a recorder would have written them, and the true states on the way."""
    simulation = load_scenario("slot-limited").simulation(seed=random.randrange(1000))
    core, records, events = simulation.core, [], []
    config = core.config
    info = EngineInfo(
        name="r", model="m", boot_id="b", pid=1, version="0", num_usable_blocks=config.num_usable_blocks,
        max_model_len=config.max_model_len, max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
    )  # fmt: skip
    path, truth = tmp_path / "a.rec", {}
    simulation.watch(lambda core, record: records.append(record))
    emitted = core.scheduler.stats.take_events
    core.scheduler.stats.take_events = lambda: events.extend(new := emitted()) or new  # type: ignore[method-assign]
    with RecordingWriter(path) as writer:
        writer.add(Recorded(wall=0, mono=0, message=Welcome(protocol=1, info=info, knobs=[], capabilities=[])))
        for half in range(60):
            simulation.run(half / 2 + 0.01)
            snapshot = core.snapshot(Viewport(running_rows=100, waiting_rows=1000))
            writer.add(Recorded(wall=half, mono=half, message=SnapshotUpdate(snapshot=snapshot, steps=records[:])))
            writer.add(Recorded(wall=half, mono=half, message=EventBatch(events=events[:])))
            records.clear()
            events.clear()
            truth[round(snapshot.mono, 6)] = core.state()
    return path, truth


@pytest.mark.parametrize("at_s", [12.0, 25.0])
def test_the_state_is_read_out_of_a_recording(recording, at_s: float) -> None:
    path, truth = recording
    read = RecordedState(Recording(path), at_s, 4.0)
    state, real = read.state, truth[round(read.state.mono, 6)]
    assert (state.knobs, state.pause, state.num_left_out) == (real.knobs, real.pause, 0)
    assert [saved.request_id for saved in state.requests] == [saved.request_id for saved in real.requests]
    for mine, theirs in zip(state.requests, real.requests, strict=True):
        assert mine.num_output_tokens == theirs.num_output_tokens
        assert mine.max_output_tokens == theirs.max_output_tokens
    assert len(state.ends) == pytest.approx(len(real.ends), abs=2)
    assert len(state.arrivals) == pytest.approx(len(real.arrivals), abs=8)
    assert read.fitted.model.base_s == pytest.approx(0.008, rel=0.1)
    assert 3.0 < read.later[-1].mono - read.later[0].mono < 4.1


def test_a_forecast_from_a_recording_stands_beside_what_was_recorded(recording) -> None:
    path, _ = recording
    shown = invoke("--from", str(path), "--set", "max_num_seqs=6", "--horizon", "6s", "--at", "15s")
    assert "as it was" in shown and "next 6 s with max_num_seqs 8 -> 6" in shown


def test_a_moment_after_the_end_of_a_recording_is_refused(recording) -> None:
    path, _ = recording
    with pytest.raises(BadRecording, match=r"--at 99 s is after the end of .*: it holds 29.5 s"):
        RecordedState(Recording(path), 99.0, 4.0)
