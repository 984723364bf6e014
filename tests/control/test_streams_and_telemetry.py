"""What is kept for watchers: records, events, joined tokens, percentiles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedtop.control import streams, telemetry
from schedtop.control.coalesce import TokenBuffer
from schedtop.control.messages import Peaks, TokenOutput
from schedtop.control.streams import EventStream, MissedChanges, StepStream
from schedtop.control.telemetry import Latencies, percentiles
from schedtop.engine.snapshot import EngineCoreEvent, EventKind, FinishReason, LimitedBy, StepRecord


def record(step=1, mono=0.0, **fields):
    values = dict.fromkeys(StepRecord.__struct_fields__, 0)
    lists = {"ttft": [], "itl": [], "e2e": [], "queue_time": [], "limited_by": LimitedBy.COMPUTE}
    return StepRecord(**{**values, **lists, "step": step, "mono": mono, **fields})


def event(sequence, kind=EventKind.QUEUED):
    return EngineCoreEvent(sequence=sequence, kind=kind, step=0, mono=0.0, wall=0.0)


def test_a_reader_gets_the_records_since_its_place():
    stream = StepStream()
    for step in range(10):
        stream.add(record(step))
    assert [r.step for r in stream.since(7, limit=100)] == [7, 8, 9]
    assert stream.since(stream.end, limit=100) == []


def test_a_reader_that_is_far_behind_gets_the_newest_records(monkeypatch):
    monkeypatch.setattr(streams, "NUM_STEPS_KEPT", 5)
    stream = StepStream()
    for step in range(10):
        stream.add(record(step))
    assert [r.step for r in stream.since(0, limit=100)] == [5, 6, 7, 8, 9]
    assert [r.step for r in stream.since(0, limit=2)] == [8, 9]


def test_peaks_are_those_of_the_steps_since_the_last_look_and_none_without_a_step():
    stream = StepStream()
    for step, running, waiting, blocks in ((1, 9, 9, 9), (2, 3, 30, 4), (3, 8, 0, 5)):
        stream.add(record(step, num_running=running, num_waiting=waiting, blocks_in_use=blocks))
    assert stream.peaks_since(1) == Peaks(num_steps=2, running=8, waiting=30, blocks_in_use=5)
    assert stream.peaks_since(stream.end) is None


def test_events_come_in_order_and_without_a_gap():
    stream = EventStream()
    stream.add(event(n) for n in range(1, 6))
    batch = stream.since(2)
    assert batch is not None
    assert ([e.sequence for e in batch.events], batch.dropped) == ([3, 4, 5], 0)
    assert stream.since(5) is None


def test_a_late_reader_misses_requests_events_but_never_a_change(monkeypatch):
    monkeypatch.setattr(streams, "NUM_EVENTS_KEPT", 4)
    stream = EventStream()
    stream.add(event(n, EventKind.KNOBS_CHANGED if n in (2, 5) else EventKind.QUEUED) for n in range(1, 11))
    batch = stream.since(0)
    assert batch is not None
    assert [e.sequence for e in batch.events] == [2, 5, 7, 8, 9, 10]
    assert batch.dropped == 4


def test_a_reader_to_which_a_change_is_lost_is_told(monkeypatch):
    monkeypatch.setattr(streams, "NUM_EVENTS_KEPT", 2)
    monkeypatch.setattr(streams, "NUM_CHANGES_KEPT", 3)
    stream = EventStream()
    stream.add(event(n, EventKind.PAUSED) for n in range(1, 11))
    with pytest.raises(MissedChanges):
        stream.since(0)
    batch = stream.since(7)
    assert batch is not None
    assert [e.sequence for e in batch.events] == [8, 9, 10]


def test_waiting_tokens_are_joined_per_request_and_end_with_its_end():
    buffer = TokenBuffer()
    buffer.add(1, [TokenOutput("a", [1]), TokenOutput("b", [7])])
    buffer.add(2, [TokenOutput("a", [2, 3], logprobs=[[(2, -0.1)], [(3, -0.2)]])])
    buffer.add(3, [TokenOutput("a", [], FinishReason.ABORT, "gone")])
    assert buffer.num_units == 10
    batch = buffer.take()
    assert batch.step == 3
    joined = TokenOutput("a", [1, 2, 3], FinishReason.ABORT, "gone", [[(2, -0.1)], [(3, -0.2)]])
    assert batch.outputs == [joined, TokenOutput("b", [7])]
    assert not buffer
    assert buffer.num_units == 0


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 50)), min_size=1, max_size=60))
def test_percentiles_are_those_of_the_spelt_out_list(weighted):
    found = percentiles(sorted(weighted))
    spelt = sorted(value for value, count in weighted for _ in range(count))
    assert found is not None
    assert found.count == len(spelt)
    assert found.max == spelt[-1]
    for percent, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
        assert value == spelt[-(-len(spelt) * percent // 100) - 1]


def test_windows_hold_ten_seconds_and_a_minute():
    latencies = Latencies()
    for second in range(100):
        latencies.add(record(second, mono=float(second), ttft=[float(second)], duration_s=0.01, itl=[(0.5, 3)]))
    summary = latencies.summary(99.0)
    ttft = summary["ttft"]
    assert (ttft.now.count, ttft.now.max) == (11, 99.0)
    assert (ttft.minute.count, ttft.minute.p50) == (61, 69.0)
    assert summary["itl"].minute.count == 183
    assert summary["e2e"].now is None


def test_percentiles_are_worked_out_at_most_once_per_interval(monkeypatch):
    calls = []
    monkeypatch.setattr(telemetry, "percentiles", lambda weighted: calls.append(1))
    latencies = Latencies()
    for hundredth in range(26):
        latencies.summary(10.0 + hundredth / 100)
    assert len(calls) == 2 * 2 * len(telemetry.NAMES)


@given(st.data())
def test_windows_are_exact_however_often_they_are_read_and_whatever_falls_out(data):
    latencies, told = Latencies(), []
    mono = 0.0
    for step in range(data.draw(st.integers(1, 40))):
        mono += data.draw(st.sampled_from([0.0, 0.3, 4.0, 30.0]))
        gaps = data.draw(st.lists(st.tuples(st.sampled_from([0.1, 0.2, 0.3]), st.integers(1, 5)), max_size=3))
        latencies.add(record(step, mono=mono, itl=gaps))
        told += [(mono, gap) for gap in gaps]
        if data.draw(st.booleans()):
            found = latencies.summary(mono + 0.3)["itl"]
            for window, length in ((found.now, telemetry.NOW_S), (found.minute, telemetry.MINUTE_S)):
                inside = [gap for at, gap in told if at >= mono + 0.3 - length]
                assert window == percentiles(sorted(inside))
            mono += 0.3


def test_samples_in_memory_are_bounded():
    latencies = Latencies()
    for step in range(30):
        latencies.add(record(step, itl=[(0.1, 1)] * 1000))
        if step % 7 == 0:
            latencies.summary(float(step))
    assert latencies.summary(0.0)["itl"].minute.count == telemetry.NUM_SAMPLES_KEPT
