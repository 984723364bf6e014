"""A recording on the screen: it plays, steps, seeks and searches, says that it is one, and changes nothing."""

import asyncio
import json
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from schedtop.cli.main import cli
from schedtop.control.recorder import BadRecording, Recorded, RecordingWriter
from schedtop.engine.snapshot import Viewport
from schedtop.tui.app import Options
from schedtop.tui.keys import KEYS, REPLAY_KEYS, keys_of, table
from schedtop.tui.playback import BadPlace, Playback, replay_bar, time_meant
from schedtop.tui.replay import ReplayApp
from schedtop.tui.tape import Tape, cut_to

NUM_FRAMES = 12


class Show:
    """Somebody looking at a replay."""

    def __init__(self, app: ReplayApp, pilot) -> None:
        self.app, self.pilot = app, pilot

    async def press(self, *keys: str) -> None:
        for key in keys:
            await self.pilot.press(key)
            await self.pilot.pause()

    async def type(self, text: str) -> None:
        names = {":": "colon", "+": "plus", "%": "percent_sign", "-": "minus"}
        await self.press(*(names.get(char, char) for char in text), "enter")

    @property
    def place(self) -> int:
        return self.app._main.playback.place

    def panel(self, name: str) -> str:
        return self.app.screen.panel.text() if name == "dialog" else self.app._main.board.panels[name].text()


class Steps:
    """A sleep that ends when the test says so; keeps what was asked for."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._turns: asyncio.Queue = asyncio.Queue()

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        await self._turns.get()

    def go(self) -> None:
        self._turns.put_nowait(None)


@pytest.fixture
def show(recording):
    @asynccontextmanager
    async def opened(size=(120, 40), sleep=asyncio.sleep):
        app = ReplayApp(Tape(recording), Options(tick_s=None), sleep)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            yield Show(app, pilot)

    return opened


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 50)], ids=str)
async def test_a_replay_says_that_it_is_one_and_shows_the_first_frame(show, size) -> None:
    async with show(size) as it:
        assert "REPLAY" in it.panel("identity") and "RO" in it.panel("identity")
        assert "live" not in it.panel("identity")
        assert it.panel("action").startswith("REPLAY ⏸ 1x")
        assert f"frame 1/{NUM_FRAMES + 1}" in it.panel("action")
        assert "chat-" in it.panel("requests")


async def test_brackets_step_and_a_step_back_shows_the_same_as_before(show) -> None:
    async with show() as it:
        seen = [it.panel("requests")]
        for _ in range(3):
            await it.press("right_square_bracket")
            seen.append(it.panel("requests"))
        assert it.place == 3
        assert len(set(seen)) == 4
        for earlier in reversed(seen[:3]):
            await it.press("left_square_bracket")
            assert it.panel("requests") == earlier
        await it.press("left_square_bracket")
        assert it.place == 0


async def test_playing_goes_on_in_the_recordings_own_time_and_stops_when_told(show) -> None:
    steps = Steps()
    async with show(sleep=steps) as it:
        frames = it.app.tape.frames
        await it.press("plus", "p")
        assert "REPLAY ▶ 2x" in it.panel("action")
        for _ in range(2):
            steps.go()
            await it.pilot.pause()
        assert it.place == 2
        assert steps.asked[:2] == pytest.approx([(frames[i + 1].wall - frames[i].wall) / 2 for i in (0, 1)])
        await it.press("p")
        steps.go()
        await it.pilot.pause()
        assert it.place == 2
        assert "⏸" in it.panel("action")


async def test_the_end_of_a_recording_stands_still_and_says_what_the_engine_said(show) -> None:
    steps = Steps()
    async with show(sleep=steps) as it:
        await it.press("9", "left_square_bracket", "p")
        steps.go()
        await it.pilot.pause()
        assert it.place == NUM_FRAMES
        assert "⏸" in it.panel("action")
        assert "shutting down" in it.panel("alerts")
        assert "GONE" in it.panel("identity")


@pytest.mark.parametrize(
    ("typed", "place_of"),
    [
        ("0s", lambda tape: 0),
        ("100%", lambda tape: NUM_FRAMES),
        ("+600s", lambda tape: NUM_FRAMES),
        (None, lambda tape: 5),
    ],
)
async def test_seek_goes_to_a_time_a_share_or_a_step(show, typed, place_of) -> None:
    async with show() as it:
        await it.press("S")
        assert it.panel("action").startswith("seek:")
        await it.type(str(it.app.tape.frames[5].step) if typed is None else typed)
        assert it.place == place_of(it.app.tape)


async def test_a_place_that_cannot_be_read_is_said_and_nothing_moves(show) -> None:
    async with show() as it:
        await it.press("right_square_bracket", "S")
        await it.type("noon")
        assert "'noon' is no place" in it.panel("action")
        assert it.place == 1


async def test_search_goes_to_the_frame_in_which_an_event_happened_and_back(show) -> None:
    async with show() as it:
        tape = it.app.tape
        hits = [i for i in range(len(tape.frames)) if any(e.kind == "preempted" for e in tape.events(i))]
        assert len(hits) > 1
        hits = [i for i in hits if i > 0]
        await it.press("s")
        await it.type("preempted for")
        assert it.place == hits[0]
        assert "preempted for" in it.panel("action")
        await it.press("n")
        assert it.place == hits[1]
        await it.press("N")
        assert it.place == hits[0]


async def test_search_for_what_is_not_there_stays_and_says_so(show) -> None:
    async with show() as it:
        await it.press("s")
        await it.type("nobody")
        assert it.place == 0
        assert "no 'nobody' after this frame" in it.panel("action")


async def test_filter_and_sort_work_on_recorded_rows(show) -> None:
    async with show() as it:
        await it.press("slash", "0", "0", "3", "enter")
        rows = [line for line in it.panel("requests").splitlines() if "chat-" in line]
        assert rows and all("chat-003" in line for line in rows[:1])
        assert not any("chat-004" in line for line in rows if "behind" not in line)


async def test_a_request_opens_with_its_events_and_says_what_a_recording_lacks(show) -> None:
    async with show() as it:
        await it.press("9", "left_square_bracket", "j", "d")
        assert "which ones is not in the recording" in it.panel("dialog")
        await it.press("escape")
        assert it.app.screen is it.app._main


async def test_no_key_of_a_replay_changes_an_engine(show) -> None:
    assert not any(key.writes for key in table(True))
    names = [name for key in table(True) for name in keys_of(key, {})]
    assert len(names) == len(set(names)), "one key, one meaning"
    async with show() as it:
        await it.press("question_mark")
        shown = it.panel("dialog")
        assert all(key.help in shown for key in REPLAY_KEYS[:4])
        assert "stage a larger value" not in shown
        await it.press("escape")
        before = it.place
        await it.press("x", "a", "u", "c", "P", "f7")
        assert it.app.screen is it.app._main
        assert it.place == before
        await it.press("5", "plus", "1", "2", "enter", "p")
        assert it.app._main.ui.staged == {}


def test_every_live_key_that_writes_is_missing_from_a_replay() -> None:
    assert {key.id for key in KEYS if key.writes}.isdisjoint({key.id for key in table(True)})


def test_frames_are_the_same_in_order_and_out_of_order(recording) -> None:
    tape = Tape(recording)
    view = tape.view_at(0)
    for place in range(1, 6):
        view = tape.advanced(view, place)
    assert tape.view_at(5) is view
    jumped = Tape(recording).view_at(5)
    assert jumped.snapshot == view.snapshot
    assert jumped.events == view.events
    assert jumped.samples == view.samples


def test_a_step_back_reads_nothing_again(recording) -> None:
    tape = Tape(recording)
    tape.view_at(8)
    tape.entries = None
    assert tape.view_at(7).snapshot.step < tape.view_at(8).snapshot.step


def test_a_filter_that_inverts_leaves_the_others(recording) -> None:
    view = Tape(recording).view_at(3)
    cut = cut_to(view, Viewport(id_contains="!chat-00"))
    assert cut.snapshot.running or cut.snapshot.waiting
    assert not any("chat-00" in row.request_id for row in (*cut.snapshot.running, *cut.snapshot.waiting))


def test_a_recording_without_a_snapshot_is_refused(tmp_path: Path, busy_link) -> None:
    path = tmp_path / "empty.rec"
    with RecordingWriter(path) as writer:
        writer.add(Recorded(wall=1, mono=1, message=busy_link.welcome()))
    with pytest.raises(BadRecording, match="holds no snapshot"):
        Tape(path)


def test_json_prints_one_line_per_frame(recording) -> None:
    result = CliRunner().invoke(cli, ["replay", str(recording), "--json"])
    assert result.exit_code == 0, result.output
    frames = [json.loads(line) for line in result.output.splitlines()]
    assert [frame["frame"] for frame in frames] == list(range(NUM_FRAMES + 1))
    assert frames[3]["snapshot"]["num_running"] > 0
    assert any(event["kind"] == "preempted" for frame in frames for event in frame["events"])
    assert set(frames[0]) >= {"schema", "info", "wall", "alerts", "findings", "latencies"}


def test_without_a_terminal_a_replay_points_to_json(recording) -> None:
    result = CliRunner().invoke(cli, ["replay", str(recording)])
    assert result.exit_code == 1
    assert "--json" in result.output


def test_a_file_that_is_no_recording_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text("hello")
    result = CliRunner().invoke(cli, ["replay", str(path), "--json"])
    assert result.exit_code == 1
    assert "isn't a recording" in result.output


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("2m", 120), ("+10s", 40), ("-10s", 20), ("50%", 300)])
def test_places_in_time(text: str, seconds: float) -> None:
    playback = Playback(wall=1030.0, first_wall=1000.0, last_wall=1600.0)
    assert time_meant(text, playback) == 1000 + seconds


@pytest.mark.parametrize("text", ["", "25:00", "12:61", "10%%", "-50%", "ten"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(BadPlace):
        time_meant(text, Playback(wall=1030.0, first_wall=1000.0, last_wall=1600.0))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_bar_is_as_wide_as_it_may_be(width: int) -> None:
    playback = Playback(place=3, total=9, wall=1030.0, first_wall=1000.0, last_wall=1600.0)
    assert sum(len(text) for text, _ in replay_bar(playback, width)) == width
