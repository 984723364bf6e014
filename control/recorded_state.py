"""An engine's scheduling state read out of a recording, as well as it can be: what a forecast from a file starts from.

Recordings hold rows, events and steps, no block contents: who shares which prefix isn't known, and of requests that
came and went between two snapshots only their number.
"""

from collections import deque

from schedtop.control.messages import EngineInfo, EventBatch, SnapshotUpdate, Welcome
from schedtop.control.recorder import BadRecording, Recording
from schedtop.engine.config import EngineConfig
from schedtop.engine.sched.stats import NUM_RECENT_REQUESTS
from schedtop.engine.sim.state import ArrivalSample, EndSample, EngineState, RequestState
from schedtop.engine.sim.step_model import FittedModel, StepModelFit
from schedtop.engine.snapshot import (
    EngineCoreEvent,
    EventKind,
    RequestRow,
    RequestStatus,
    Snapshot,
    StepRecord,
    WaitReason,
)


class RecordedState:
    """Reads a recording up to a moment; `later` holds the steps of the `horizon_s` after it."""

    def __init__(self, recording: Recording, at_s: float | None, horizon_s: float) -> None:
        """`at_s`: seconds after the first snapshot; by default so that the horizon is in the recording, if it fits.

        Raises `BadRecording`.
        """
        self._info: EngineInfo | None = None
        self._rows: dict[str, tuple[RequestRow, int]] = {}
        """Request id -> its newest row, and the step it is from."""
        self._arrivals: deque[tuple[float, str]] = deque(maxlen=NUM_RECENT_REQUESTS)
        self._ends: deque[EndSample] = deque(maxlen=NUM_RECENT_REQUESTS)
        self._fit = StepModelFit()
        self._snapshot: Snapshot | None = None
        self._step = 0
        self.later: list[StepRecord] = []
        self._read(recording, _moment(recording, at_s, horizon_s), horizon_s)

    def _read(self, recording: Recording, until: float, horizon_s: float) -> None:
        for entry in recording.read():
            match entry.message:
                case Welcome():
                    self._info = entry.message.info
                case EventBatch() if not self.later:
                    for event in entry.message.events:
                        if event.mono <= until:
                            self._note(event)
                case SnapshotUpdate():
                    self._take(entry.message, until, horizon_s)

    def _take(self, update: SnapshotUpdate, until: float, horizon_s: float) -> None:
        snapshot = update.snapshot
        for record in update.steps:
            if record.mono <= until:
                self._fit.add(record)
                self._step = record.step
            elif record.mono <= until + horizon_s:
                self.later.append(record)
        if snapshot.mono <= until:
            self._snapshot = snapshot
            self._rows |= {row.request_id: (row, snapshot.step) for row in [*snapshot.running, *snapshot.waiting]}

    def _note(self, event: EngineCoreEvent) -> None:
        if event.request_id is None:
            return
        if event.kind is EventKind.QUEUED:
            self._arrivals.append((event.mono, event.request_id))
        elif event.kind is EventKind.FINISHED and event.detail.split(":")[0] in ("stop", "length"):
            row, step = self._rows.get(event.request_id, (None, 0))
            if row is not None:
                is_cut = event.detail.startswith("length")
                grown = min(row.max_tokens, row.num_output_tokens + max(0, event.step - step))
                num_output = row.max_tokens if is_cut else grown
                kind = (row.num_prompt_tokens, row.max_tokens, row.priority)
                self._ends.append(EndSample(event.mono, *kind, num_output))

    @property
    def fitted(self) -> FittedModel:
        """The step model of the steps up to that moment. Raises `BadRecording` if there were too few."""
        fitted = self._fit.fitted()
        if fitted is None:
            raise BadRecording("too few steps before that moment to model a step's time")
        return fitted

    @property
    def state(self) -> EngineState:
        """The state at the newest snapshot. Raises `BadRecording`."""
        snapshot, info = self._snapshot, self._info
        if snapshot is None or info is None:
            raise BadRecording("it holds no snapshot up to that moment: nothing to start a forecast from")
        rows = [*snapshot.running, *snapshot.waiting]
        return EngineState(
            mono=snapshot.mono,
            step=snapshot.step,
            config=EngineConfig(
                name=info.name,
                block_size=info.block_size,
                num_kv_blocks=info.num_usable_blocks + 1,
                max_model_len=info.max_model_len,
                max_num_batched_tokens=info.max_num_batched_tokens,
                max_num_seqs=info.max_num_seqs,
                max_num_speculative_tokens=snapshot.knobs.num_speculative_tokens,
            ),
            knobs=snapshot.knobs,
            pause=snapshot.pause,
            requests=[_request_state(row) for row in rows],
            num_left_out=snapshot.num_running + snapshot.num_waiting - len(rows),
            arrivals=self._arrival_samples(),
            ends=list(self._ends),
        )

    def _arrival_samples(self) -> list[ArrivalSample]:
        """Who was in no snapshot is taken to be like the one before."""
        samples: list[ArrivalSample] = []
        for at, request_id in self._arrivals:
            if request_id in self._rows:
                row = self._rows[request_id][0]
                samples.append(ArrivalSample(at, row.num_prompt_tokens, row.max_tokens, row.priority))
            elif samples:
                before = samples[-1]
                samples.append(ArrivalSample(at, before.num_prompt_tokens, before.max_tokens, before.priority))
        return samples


def _moment(recording: Recording, at_s: float | None, horizon_s: float) -> float:
    monos = [entry.message.snapshot.mono for entry in recording.read() if isinstance(entry.message, SnapshotUpdate)]
    if not monos:
        raise BadRecording(f"{recording.path} holds no snapshot: nothing to start a forecast from")
    first, last = monos[0], monos[-1]
    if at_s is None:
        return last - horizon_s if last - first > 2 * horizon_s else last
    if at_s > last - first:
        raise BadRecording(f"--at {at_s:g} s is after the end of {recording.path}: it holds {last - first:.1f} s")
    return first + at_s


def _request_state(row: RequestRow) -> RequestState:
    is_running = row.status is RequestStatus.RUNNING
    return RequestState(
        request_id=row.request_id,
        is_running=is_running,
        was_admitted=is_running or row.num_preemptions > 0,
        is_held=row.wait_reason is WaitReason.HELD,
        priority=row.priority,
        arrived=row.arrived,
        num_prompt_tokens=row.num_prompt_tokens,
        num_output_tokens=row.num_output_tokens,
        max_output_tokens=row.max_tokens,
        num_computed_tokens=row.num_computed_tokens if is_running else 0,
        contents=[],
        num_preemptions=row.num_preemptions,
    )
