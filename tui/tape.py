"""A recording as frames: a frame is one snapshot and all that was told since the one before. Plays and draws nothing.

Only where frames lie is kept; what is in them is read when it is looked at, a chunk of the file at a time.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import msgspec

from schedtop.control.messages import EventBatch, Goodbye, SnapshotUpdate, Welcome
from schedtop.control.recorder import BadRecording, Recorded, Recording
from schedtop.engine.snapshot import EngineCoreEvent, RequestDetail, RequestRow, Snapshot, Viewport
from schedtop.tui.alerts import folded
from schedtop.tui.state import EngineView, LinkDown, LinkEvent, LinkUp, Received

FRAMES_BEFORE = 400
"""Frames folded to show one out of order: so far back do plots and the decision log reach."""
_CHUNKS_HELD = 4
_VIEWS_HELD = 32
"""Frames shown or passed last that are kept, so that a step back costs nothing."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Where one frame lies: entries from `first` up to, not including, `past`, each (chunk, place in it)."""

    first: tuple[int, int]
    past: tuple[int, int]
    wall: float
    step: int


class Tape:
    """A recording, frame by frame. Raises `BadRecording` when there is nothing to show in it."""

    def __init__(self, path: Path) -> None:
        self.target = str(path)
        self._recording = Recording(path)
        self._views: dict[int, EngineView] = {}
        self._chunk = lru_cache(maxsize=_CHUNKS_HELD)(self._read_chunk)
        self.frames = self._index()
        if not self.frames:
            raise BadRecording(f"{path} holds no snapshot: record for longer, or with a smaller --interval")

    def _read_chunk(self, number: int) -> list[Recorded]:
        return list(self._recording.read(number, 1))

    def _index(self) -> list[Frame]:
        frames: list[Frame] = []
        first, last, step = (0, 0), None, -1
        for number in range(len(self._recording.chunks)):
            for place, entry in enumerate(self._read_chunk(number)):
                past = (number, place + 1)
                last = entry
                if isinstance(entry.message, SnapshotUpdate):
                    step = entry.message.snapshot.step
                    frames.append(Frame(first, past, entry.wall, step))
                    first, last = past, None
        if last is not None and isinstance(last.message, Goodbye) and frames:
            frames.append(Frame(first, past, last.wall, step))
        return frames

    def entries(self, place: int) -> Iterator[Recorded]:
        """What frame `place` holds, in order."""
        (chunk, index), past = self.frames[place].first, self.frames[place].past
        for number in range(chunk, past[0] + 1):
            held = self._chunk(number)
            yield from held[index if number == chunk else 0 : past[1] if number == past[0] else len(held)]

    def advanced(self, view: EngineView, place: int) -> EngineView:
        """`view`, which shows the frame before, with frame `place` folded in."""
        for entry in self.entries(place):
            view = folded(view, self._event(entry), entry.wall)
        self._views.pop(place, None)
        self._views[place] = view
        if len(self._views) > _VIEWS_HELD:
            del self._views[next(iter(self._views))]
        return view

    def _event(self, entry: Recorded) -> LinkEvent:
        match entry.message:
            case Welcome() as welcome:
                return LinkUp(self.target, msgspec.structs.replace(welcome, capabilities=[], read_only=True))
            case Goodbye(reason=reason):
                return LinkDown(self.target, f"the engine said goodbye: {reason}", 0.0)
            case message:
                return Received(self.target, message)

    def view_at(self, place: int) -> EngineView:
        """What a screen that watched for some time would know at frame `place`."""
        if (known := self._views.get(place)) is not None:
            return known
        first = max(0, place - FRAMES_BEFORE)
        view = EngineView(self.target)
        if (welcome := self._welcome_before(first)) is not None:
            view = folded(view, self._event(welcome), welcome.wall)
        for number in range(first, place + 1):
            view = self.advanced(view, number)
        return view

    def _welcome_before(self, place: int) -> Recorded | None:
        """The newest greeting before frame `place`: it names the engine and its knobs."""
        chunk, index = self.frames[place].first
        for number in range(chunk, -1, -1):
            held = self._chunk(number)
            for entry in reversed(held[: index if number == chunk else len(held)]):
                if isinstance(entry.message, Welcome):
                    return entry
        return None

    # ---- finding --------------------------------------------------------------------------------------------

    def place_at(self, wall: float) -> int:
        """The last frame at or before a time; the first if there is none."""
        return max(0, bisect.bisect_right([frame.wall for frame in self.frames], wall) - 1)

    def place_of_step(self, step: int) -> int:
        """The first frame that knows of `step`; the last if none does."""
        steps = [frame.step for frame in self.frames]
        return next((place for place, known in enumerate(steps) if known >= step), len(steps) - 1)

    def find(self, text: str, after: int, direction: int) -> tuple[int, str] | None:
        """The next frame beyond `after` in which something happened that `text` names, and what.

        Request ids, kinds of event and details count; without any such event, a frame that lists such a request.
        """
        places = range(after + 1, len(self.frames)) if direction > 0 else range(after - 1, -1, -1)
        wanted = text.lower()
        for place in places:
            for event in self.events(place):
                if wanted in (words := event_words(event)).lower():
                    return place, words
        for place in places:
            for row in self._rows(place):
                if wanted in row.request_id.lower():
                    return place, f"{row.request_id} is {row.status.value}"
        return None

    def events(self, place: int) -> list[EngineCoreEvent]:
        """What happened between frame `place` and the one before."""
        batches = (entry.message for entry in self.entries(place))
        return [event for batch in batches if isinstance(batch, EventBatch) for event in batch.events]

    def _rows(self, place: int) -> Iterator[RequestRow]:
        for entry in self.entries(place):
            if isinstance(entry.message, SnapshotUpdate):
                yield from entry.message.snapshot.running
                yield from entry.message.snapshot.waiting


def event_words(event: EngineCoreEvent) -> str:
    """An event in one line: what is searched and what a hit says."""
    beneficiary = event.preemption.beneficiary if event.preemption else None
    whom = f"for {beneficiary}" if beneficiary else ""
    changes = ", ".join(f"{name} {old} → {new}" for name, (old, new) in event.changes.items())
    kind = event.kind.value.replace("_", " ")
    return " ".join(word for word in (event.request_id or "", kind, whom, changes, event.detail) if word)


def cut_to(view: EngineView, viewport: Viewport) -> EngineView:
    """`view` as the engine would have sent it to `viewport`, as far as the recording's rows reach."""
    update = view.update
    if update is None:
        return view
    snapshot = update.snapshot
    running = _matching(snapshot.running, viewport)
    waiting = _matching(snapshot.waiting, viewport)
    is_whole = not viewport.id_contains
    cut = msgspec.structs.replace(
        snapshot,
        running=running,
        waiting=waiting[viewport.waiting_offset :],
        num_running_matched=snapshot.num_running if is_whole else len(running),
        num_waiting_matched=snapshot.num_waiting if is_whole else len(waiting),
        detail=_detail(view, snapshot, viewport.detail),
    )
    return replace(view, update=msgspec.structs.replace(update, snapshot=cut))


def _matching(rows: Sequence[RequestRow], viewport: Viewport) -> list[RequestRow]:
    text = viewport.id_contains.removeprefix("!")
    is_inverted = viewport.id_contains.startswith("!")
    found = [row for row in rows if not text or (text in row.request_id) is not is_inverted]
    if viewport.sort:
        found.sort(key=lambda row: getattr(row, viewport.sort))
    return found[::-1] if viewport.descending else found


def _detail(view: EngineView, snapshot: Snapshot, request_id: str | None) -> RequestDetail | None:
    """A request from close by, put together from its row and its events; its block ids aren't in a recording."""
    row = next((row for row in (*snapshot.running, *snapshot.waiting) if row.request_id == request_id), None)
    if row is None:
        return None
    events = [event for event in view.events if event.request_id == request_id]
    return RequestDetail(request_id=row.request_id, row=row, block_ids=[], events=events)
