"""The forecast beside a staged value: asked at the side, shown with its range, dropped when the value changes."""

import asyncio

import pytest

from schedtop.control.asked_forecast import NoForecast
from schedtop.engine.sim.outlook import Forecast, Outlook, Range
from schedtop.tui.views.knobs import prospect_lines


class Oracle:
    """A forecaster that answers when told to; keeps what was asked and what was given up."""

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.given_up: list[dict] = []
        self.answers: dict[int, asyncio.Future] = {}

    async def __call__(self, address: str, changes) -> Forecast:
        number = len(self.asked)
        self.asked.append(dict(changes))
        self.answers[number] = asyncio.get_running_loop().create_future()
        try:
            return await self.answers[number]
        except asyncio.CancelledError:
            self.given_up.append(dict(changes))
            raise


def outlook(itl_ms: float, spread_ms: float = 0.0, preemptions: float = 0.0) -> Outlook:
    mid = itl_ms / 1e3
    none = Range(0.0, 0.0, 0.0)
    return Outlook(
        ttft_p50_s=None,
        ttft_p95_s=None,
        itl_p50_s=None,
        itl_p99_s=Range(mid, mid - spread_ms / 1e3, mid + spread_ms / 1e3),
        output_tokens_per_s=none,
        preemptions=Range(preemptions, preemptions, preemptions),
        lost_tokens=none,
        finished=none,
        queue_drained_s=None,
    )


def foreseen(now: Outlook, then: Outlook, *warnings: str) -> Forecast:
    return Forecast(horizon_s=30, now=now, then=then, changes={}, num_draws=8, cpu_s=1.0, warnings=list(warnings))


FORESEEN = foreseen(outlook(41.0, preemptions=9), outlook(23.0, 2.0), "3 left out")


@pytest.fixture
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture
def desk(make_app, busy_link, oracle):
    """The screen with a staged value: `async with desk() as (pilot, panel)`."""
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def opened(size=(120, 40), can_look_ahead=True):
        if can_look_ahead:
            busy_link.capabilities += ["GetState", "GetStepModel"]
        app = make_app(busy_link, forecaster=oracle)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            busy_link.publish()
            await pilot.pause()
            for key in ("5", "j", "minus"):
                await pilot.press(key)
                await pilot.pause()
            yield pilot, lambda: app._main.board.panels["knobs"].text()

    return opened


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)], ids=str)
async def test_a_staged_value_shows_what_is_foreseen_now_and_then_with_range_and_notes(desk, oracle, size) -> None:
    async with desk(size) as (pilot, panel):
        assert "no forecast yet" in panel()
        assert oracle.asked == [{"max_num_seqs": 15}]
        oracle.answers[0].set_result(FORESEEN)
        await pilot.pause()
        assert "41.0 ms → 23.0 ms (21.0 ms to 25.0 ms)" in panel()
        assert "TTFT p95       – →       –" in panel()
        assert "preempted      9 →       0" in panel()
        assert "next 30 s, 8 draws · 3 left out" in panel()
        assert "Enter apply" in panel()


async def test_a_changed_stage_gives_the_old_forecast_up_and_asks_anew(desk, oracle) -> None:
    async with desk() as (pilot, panel):
        await pilot.press("minus")
        await pilot.pause()
        assert oracle.asked == [{"max_num_seqs": 15}, {"max_num_seqs": 14}]
        assert oracle.given_up == [{"max_num_seqs": 15}]
        oracle.answers[1].set_result(FORESEEN)
        await pilot.pause()
        await pilot.press("minus")
        await pilot.pause()
        assert "no forecast yet" in panel(), "the forecast of 14 is none of 13"


async def test_a_dropped_stage_gives_its_forecast_up(desk, oracle) -> None:
    async with desk() as (pilot, panel):
        await pilot.press("escape")
        await pilot.pause()
        assert oracle.given_up == [{"max_num_seqs": 15}]
        assert "forecast" not in panel()


async def test_a_forecast_that_fails_says_why(desk, oracle) -> None:
    async with desk() as (pilot, panel):
        oracle.answers[0].set_exception(NoForecast("too few steps seen"))
        await pilot.pause()
        assert "no forecast: too few steps seen" in panel()


async def test_an_engine_that_does_not_export_its_state_is_not_asked(desk, oracle) -> None:
    async with desk(can_look_ahead=False) as (_, panel):
        assert "no forecast: not exported by this engine" in panel()
        assert oracle.asked == []


async def test_a_value_that_would_be_refused_is_not_looked_ahead_with(desk, oracle) -> None:
    async with desk() as (pilot, panel):
        await pilot.press("9", "9", "9", "enter")
        await pilot.pause()
        assert "no forecast: max_num_seqs would be refused" in panel()
        assert oracle.asked == [{"max_num_seqs": 15}]


def test_a_measure_inside_the_present_range_is_not_called_better_or_worse() -> None:
    from schedtop.tui.foresight import Prospect

    same = foreseen(outlook(40.0, 5.0), outlook(42.0, 5.0))
    roles = {role for line in prospect_lines(Prospect(changes={}, forecast=same), 60) for _, role in line}
    assert not roles & {"good", "warn"}


def test_notes_are_read_whole_where_there_is_room_and_never_hang_over() -> None:
    from schedtop.tui.foresight import Prospect

    warning = "extrapolates: 4096 prefill tokens in a step, 512 seen at most"
    prospect = Prospect(changes={}, forecast=foreseen(outlook(40.0), outlook(42.0), warning))
    roomy = [text for line in prospect_lines(prospect, 48, num_notes=3)[3:] for text, _ in line]
    assert warning in " ".join(text.strip() for text in roomy)
    tight = prospect_lines(prospect, 48)
    assert len(tight) == 4
    assert all(sum(len(text) for text, _ in line) <= 48 for line in tight)
