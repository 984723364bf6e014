"""One future of a live engine, run on the engine's own scheduler and a virtual clock; the engine isn't touched."""

from collections.abc import Callable

from schedtop.engine.core import EngineCore
from schedtop.engine.errors import RequestRefused
from schedtop.engine.knobs import Knobs
from schedtop.engine.outputs import EngineCoreOutputs
from schedtop.engine.runner.simulated import END_TOKEN, SimulatedRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sim.clock import VirtualClock
from schedtop.engine.sim.future import WINDOW_S, Drawn, Future
from schedtop.engine.sim.outlook import Tally
from schedtop.engine.sim.state import EngineState, restore, stand_in_tokens
from schedtop.engine.sim.step_model import StepModel
from schedtop.engine.snapshot import EventKind

Watch = Callable[[EngineCoreOutputs, float], None]
"""Sees what a step gave, and the clock at its end."""

_OWN = 1 << 50
"""Above all stand-in tokens of contents: what no other request has."""
_ADMITTED = (EventKind.SCHEDULED, EventKind.RESUMED)


class Draw:
    """One draw of the future under one knob set; equal seeds draw equal futures."""

    def __init__(
        self,
        state: EngineState,
        knobs: Knobs,
        model: StepModel,
        horizon_s: float,
        seed: int,
        *,
        window_s: float = WINDOW_S,
        watch: Watch | None = None,
    ) -> None:
        """Requests come for `horizon_s` seconds, as they came in the last `window_s`; `watch` sees each step's end."""
        self.tally = Tally(state.mono)
        self.starts: dict[str, float] = {}
        """Waiting request -> seconds until it was first admitted."""
        self.arrived: dict[str, float] = {}
        """Request that came in this draw -> when."""
        self.num_refused = 0
        self._future = Future(state, horizon_s, seed, window_s)
        self._block_size = state.config.block_size
        self._waiting = {saved.request_id for saved in state.requests if not saved.is_running}
        self._num_submitted = 0
        self._watch = watch
        self._clock = VirtualClock()
        self._clock.jump_to(state.mono)
        scheduler = restore(state, knobs, self._clock)
        self._lengths = {saved.request_id: saved.num_prompt_tokens + self._future.ending(saved)
                         for saved in state.requests}  # fmt: skip
        runner = SimulatedRunner(model, self._clock.advance, self._lengths)
        runner.resume(scheduler.running)
        self._core = EngineCore(state.config, runner, clock=self._clock, scheduler=scheduler)

    @property
    def now(self) -> float:
        """The virtual clock."""
        return self._clock.now

    def advance(self, until_s: float) -> bool:
        """Go on until so many seconds after the start; False when nothing is left to happen."""
        core, future, clock = self._core, self._future, self._clock
        end = self.tally.began + until_s
        while clock.now < end:
            if not core.has_work:
                if future.next_at is None:
                    return False
                if future.next_at >= end:
                    return True
                clock.jump_to(future.next_at)
            for drawn in future.take_due(clock.now):
                self._submit(drawn)
            taken = core.step()
            if taken is not None and taken.record is not None:
                self._note(taken)
            elif not core.has_work and future.next_at is None:
                return False
        return True

    def _submit(self, drawn: Drawn) -> None:
        self._num_submitted += 1
        request_id, like = f"forecast-{self._num_submitted}", drawn.like
        self.arrived[request_id] = drawn.at
        tokens = stand_in_tokens(like.contents, self._block_size)[: like.num_prompt_tokens]
        tokens += [_OWN + self._num_submitted] * (like.num_prompt_tokens - len(tokens))
        self._lengths[request_id] = like.num_prompt_tokens + drawn.num_output_tokens
        sampling = SamplingParams(max_tokens=like.max_tokens, ignore_eos=True, stop_token_ids=(END_TOKEN,))
        try:
            self._core.add_request(request_id, tokens, sampling, like.priority, arrived=drawn.at)
        except RequestRefused:
            self.num_refused += 1
            del self._lengths[request_id]

    def _note(self, taken: EngineCoreOutputs) -> None:
        record = taken.record
        assert record is not None
        self.tally.add(record)
        if self._watch is not None:
            self._watch(taken, self._clock.now)
        if record.num_finished:
            self._future.note_ends(record.num_finished, self._clock.now)
            for output in taken.outputs:
                if output.finish_reason is not None:
                    self._lengths.pop(output.request_id, None)
        for event in taken.events if self._waiting else ():
            if event.kind in _ADMITTED and event.request_id in self._waiting:
                self._waiting.discard(event.request_id)
                self.starts[event.request_id] = event.mono - self.tally.began

    def end(self) -> None:
        """Close."""
        self._core.shutdown()
