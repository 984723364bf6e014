"""What a snapshot looks at while very many wait: its viewport and a bounded scan, however deep and however sorted."""

import random

import pytest
from factories import Engine, prompt

from schedtop.engine.core import EngineCore
from schedtop.engine.sched.explain import in_schedule_order
from schedtop.engine.sched.queue import RequestQueue
from schedtop.engine.snapshot import MAX_SCANNED, Viewport

NUM_WAITING = 100_000
NUM_HELD = 500
ROWS = 50


@pytest.fixture(scope="module")
def crowded() -> EngineCore:
    """A paused engine in which 100,000 wait, some of them held."""
    engine = Engine()
    engine.core.pause("keep")
    for number in range(NUM_WAITING):
        engine.add(f"r{number}", prompt(16), 4)
    engine.core.hold([f"r{number}" for number in range(0, NUM_WAITING, NUM_WAITING // NUM_HELD)])
    return engine.core


@pytest.mark.parametrize(
    "view",
    [
        {},
        {"waiting_offset": NUM_WAITING // 2},
        {"waiting_offset": NUM_WAITING - ROWS},
        {"waiting_offset": NUM_WAITING + 7},
        {"sort": "num_output_tokens", "descending": True},
        {"id_contains": "99"},
        {"id_contains": "nobody", "waiting_offset": NUM_WAITING},
    ],
)
def test_a_snapshot_of_a_hundred_thousand_looks_at_no_more_than_its_view_needs(crowded, monkeypatch, view) -> None:
    looked_at = []

    def counted(queue, start, stop=None):
        for request in queue._requests.islice(start, stop):
            looked_at.append(request)
            yield request

    monkeypatch.setattr(RequestQueue, "islice", counted)
    monkeypatch.setattr(RequestQueue, "__iter__", lambda queue: counted(queue, 0))
    snapshot = crowded.snapshot(Viewport(waiting_rows=ROWS, **view))
    limit = MAX_SCANNED if "sort" in view or "id_contains" in view else ROWS
    assert len(looked_at) <= limit + 2
    assert snapshot.num_waiting == NUM_WAITING
    assert snapshot.is_scan_cut == (limit == MAX_SCANNED)


def test_rows_from_any_place_are_those_of_the_whole_order() -> None:
    draw = random.Random(4)
    engine = Engine(knobs={"policy": "priority"})
    engine.core.pause("keep")
    for number in range(60):
        engine.add(f"r{number}", prompt(16), 4, priority=draw.randrange(5))
    engine.core.hold([f"r{number}" for number in draw.sample(range(60), 25)])
    whole = list(in_schedule_order(engine.sched))
    assert whole == sorted([*engine.sched.waiting, *engine.sched.deferred], key=lambda request: request.queue_key)
    for place in range(65):
        assert list(in_schedule_order(engine.sched, place)) == whole[place:]
    rows = engine.core.snapshot(Viewport(waiting_rows=10, waiting_offset=30)).waiting
    assert [row.request_id for row in rows] == [request.request_id for request in whole[30:40]]
    assert [row.position for row in rows] == list(range(30, 40))
