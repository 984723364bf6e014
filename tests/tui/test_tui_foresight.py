"""The forecast beside a staged value: asked at the side, shown with its range, dropped when the value changes."""

import asyncio
import os
import sys

import pytest

from schedtop.tui.foresight import Forecast, NoForecast, Outlook, Range, ask, command
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
    return Outlook(
        ttft_p95_s=None,
        itl_p99_s=Range(mid, mid - spread_ms / 1e3, mid + spread_ms / 1e3),
        preemptions=Range(preemptions, preemptions, preemptions),
    )


FORESEEN = Forecast(
    horizon_s=30, num_draws=8, now=outlook(41.0, preemptions=9), then=outlook(23.0, 2.0), warnings=["3 left out"]
)


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


async def test_the_forecasting_process_is_killed_when_nobody_wants_its_answer(tmp_path) -> None:
    alive = tmp_path / "alive"
    os.mkfifo(alive)
    code = f"import os,time; open({str(alive)!r},'w').write(str(os.getpid())); time.sleep(600)"
    asking = asyncio.create_task(ask([sys.executable, "-c", code], limit_s=60))
    pid = int(await asyncio.to_thread(alive.read_text))
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("code", "limit_s", "said"),
    [
        ("import time; time.sleep(600)", 0.05, "longer than 0.05 s"),
        ("import sys; sys.exit('schedtop: error: no engine answers')", 60, "^no engine answers$"),
        ("print('{')", 60, "can't be read"),
    ],
)
async def test_a_process_that_brings_no_forecast_says_why(code: str, limit_s: float, said: str) -> None:
    with pytest.raises(NoForecast, match=said):
        await ask([sys.executable, "-c", code], limit_s)


def test_values_are_written_as_the_command_line_reads_them() -> None:
    words = command("/run/a.sock", {"prefix_caching": False, "max_num_seqs": 3})
    assert words[-4:] == ["--set", "prefix_caching=false", "--set", "max_num_seqs=3"]


def test_a_measure_inside_the_present_range_is_not_called_better_or_worse() -> None:
    from schedtop.tui.foresight import Prospect

    same = Forecast(horizon_s=30, now=outlook(40.0, 5.0), then=outlook(42.0, 5.0))
    roles = {role for line in prospect_lines(Prospect(changes={}, forecast=same), 60) for _, role in line}
    assert not roles & {"good", "warn"}


def test_notes_are_read_whole_where_there_is_room_and_never_hang_over() -> None:
    from schedtop.tui.foresight import Prospect

    warning = "extrapolates: 4096 prefill tokens in a step, 512 seen at most"
    foreseen = Forecast(horizon_s=30, now=outlook(40.0), then=outlook(42.0), warnings=[warning])
    prospect = Prospect(changes={}, forecast=foreseen)
    roomy = [text for line in prospect_lines(prospect, 48, num_notes=3)[3:] for text, _ in line]
    assert warning in " ".join(text.strip() for text in roomy)
    tight = prospect_lines(prospect, 48)
    assert len(tight) == 4
    assert all(sum(len(text) for text, _ in line) <= 48 for line in tight)
