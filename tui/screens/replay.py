"""The main screen on a recording: keys that move in time, none that changes an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from textual import events

from schedtop.tui.playback import BadPlace, Playback, faster, time_meant
from schedtop.tui.screens.main import MainScreen

if TYPE_CHECKING:
    from schedtop.tui.replay import ReplayApp


class ReplayScreen(MainScreen):
    """Moves through a recording. Where it stands is in `ui.playback`."""

    @property
    def player(self) -> ReplayApp:
        """The app, by its real type."""
        from schedtop.tui.replay import ReplayApp

        assert isinstance(self.app, ReplayApp)
        return self.app

    @property
    def playback(self) -> Playback:
        """Where the replay stands."""
        assert self.ui.playback is not None
        return self.ui.playback

    async def on_key(self, event: events.Key) -> None:
        """Typing goes to the open question; else as on the live screen."""
        if self.playback.prompt:
            self._type_answer(event)
            event.stop()
            event.prevent_default()
        else:
            await super().on_key(event)

    def _type_answer(self, event: events.Key) -> None:
        playback = self.playback
        if event.key in ("escape", "ctrl+c"):
            self._set(replace(playback, prompt="", typed=""))
        elif event.key == "enter":
            self._set(replace(playback, prompt="", typed=""))
            self._answer(playback.prompt, playback.typed)
        elif event.key == "backspace":
            self._set(replace(playback, typed=playback.typed[:-1]))
        elif event.character and event.is_printable:
            self._set(replace(playback, typed=playback.typed + event.character))

    def _set(self, playback: Playback) -> None:
        self.change(replace(self.ui, playback=playback))

    def _answer(self, prompt: str, typed: str) -> None:
        if prompt == "search":
            self._set(replace(self.playback, sought=typed))
            self.action_find(1)
        elif typed.strip().isdecimal():
            self.player.show_frame(self.player.tape.place_of_step(int(typed)))
        elif typed.strip():
            try:
                self.player.show_frame(self.player.tape.place_at(time_meant(typed, self.playback)))
            except BadPlace as fault:
                self._set(replace(self.playback, note=str(fault)))

    def action_play(self) -> None:
        """Play, or stop playing; at the end, from the start."""
        if self.playback.is_playing:
            self.player.stop()
        else:
            self.player.play()

    def action_step(self, delta: int) -> None:
        """Some frames on or back, standing still."""
        self.player.stop()
        self.player.show_frame(self.playback.place + delta)

    def action_ends(self, place: int) -> None:
        """To the first frame or the last."""
        self.player.stop()
        self.player.show_frame(0 if place == 0 else self.playback.total - 1)

    def action_speed(self, direction: int) -> None:
        """Play faster or slower."""
        self._set(replace(self.playback, speed=faster(self.playback.speed, direction), note=""))

    def action_ask_place(self) -> None:
        """Type where to go."""
        self._set(replace(self.playback, prompt="seek", typed="", note=""))

    def action_ask_text(self) -> None:
        """Type what to search."""
        self._set(replace(self.playback, prompt="search", typed="", note=""))

    def action_find(self, direction: int) -> None:
        """To the next or previous frame in which what was searched for happens."""
        sought = self.playback.sought
        if not sought:
            self._set(replace(self.playback, note="nothing searched for yet: press s"))
            return
        self.player.stop()
        hit = self.player.tape.find(sought, self.playback.place, direction)
        if hit is None:
            where = "after" if direction > 0 else "before"
            self._set(replace(self.playback, note=f"no {sought!r} {where} this frame"))
        else:
            self.player.show_frame(hit[0], note=hit[1])
