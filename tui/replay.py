"""The screen's application on a recording instead of an engine: shows frames, plays them in time."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from schedtop.control.messages import AnyCommand, Reply
from schedtop.engine.snapshot import Viewport
from schedtop.tui.app import Options, SchedtopApp
from schedtop.tui.link import Post, Refusal
from schedtop.tui.playback import LONGEST_GAP_S, Playback
from schedtop.tui.screens.replay import ReplayScreen
from schedtop.tui.state import Action, EngineView, Ui
from schedtop.tui.tape import Tape, cut_to


class NoLink:
    """A `Link` that leads nowhere: a recording takes no commands."""

    def __init__(self, target: str) -> None:
        self._target = target

    @property
    def target(self) -> str:
        """The recording's path."""
        return self._target

    async def run(self, post: Post) -> None:
        """Nothing comes from here."""

    async def request(self, command: AnyCommand) -> Reply | Refusal:
        """Refuse."""
        return Refusal("replay", "this is a recording: there is no engine to ask")


class ReplayApp(SchedtopApp):
    """A recording on screen. `view_now` is what is known at the frame shown; the screen gets it cut to its viewport."""

    def __init__(self, tape: Tape, options: Options, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self.tape = tape
        self._sleep = sleep
        self._viewport = Viewport()
        super().__init__([NoLink(tape.target)], replace(options, read_only=True, clock=self._tape_time))
        self._view_now = EngineView(tape.target)
        self.show_frame(0)

    def _new_main(self, action: Action | None) -> ReplayScreen:
        frames = self.tape.frames
        playback = Playback(total=len(frames), first_wall=frames[0].wall, last_wall=frames[-1].wall)
        return ReplayScreen(Ui(is_read_only=True, action=action, playback=playback), self.options.is_ascii)

    @property
    def _playback(self) -> Playback:
        playback = self._main.ui.playback
        assert playback is not None
        return playback

    def _tape_time(self) -> float:
        """The clock stands at the frame shown: recorded data doesn't get old."""
        return self._playback.wall if hasattr(self, "_main") else 0.0

    def want(self, viewport: Viewport) -> None:
        """Cut the frame shown to another viewport."""
        if viewport != self._viewport:
            self._viewport = viewport
            self._main.ui = replace(self._main.ui, waiting_base=viewport.waiting_offset)
            self._put_up()

    def _put_up(self) -> None:
        self.views[self.current] = cut_to(self._view_now, self._viewport)
        self.paint_soon()

    def show_frame(self, place: int, note: str = "") -> None:
        """Go to a frame; beyond an end, to that end."""
        place = max(0, min(self._playback.total - 1, place))
        is_next = place == self._playback.place + 1
        self._view_now = self.tape.advanced(self._view_now, place) if is_next else self.tape.view_at(place)
        frame = self.tape.frames[place]
        playback = replace(self._playback, place=place, wall=frame.wall, step=frame.step, note=note)
        self._main.ui = replace(self._main.ui, playback=playback)
        self._put_up()

    def play(self) -> None:
        """Go on in time until the end, or until stopped; at the end, start over."""
        if self._playback.place == self._playback.total - 1:
            self.show_frame(0)
        self._set_playing(True)
        self.run_worker(self._go_on(), group="play", exclusive=True)

    def stop(self) -> None:
        """Stand still."""
        self.workers.cancel_group(self, "play")
        self._set_playing(False)

    def _set_playing(self, is_playing: bool) -> None:
        self._main.change(replace(self._main.ui, playback=replace(self._playback, is_playing=is_playing, note="")))

    async def _go_on(self) -> None:
        frames = self.tape.frames
        while (place := self._playback.place) < len(frames) - 1:
            gap = max(0.0, min(LONGEST_GAP_S, frames[place + 1].wall - frames[place].wall))
            await self._sleep(gap / self._playback.speed)
            self.show_frame(place + 1)
        self._set_playing(False)
