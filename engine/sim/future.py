"""What is still to come, guessed from what an engine has seen: who arrives when, and where each answer ends.

One `Future` is one draw. Two knob sets that are compared see equal draws: the same requests in the same order, and the
same lengths. No scheduler is run here.
"""

import random
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from schedtop.engine.sim.state import ArrivalSample, EndSample, EngineState, RequestState

WINDOW_S = 120.0
"""How far back arrivals count as recent ..."""
MIN_RECENT = 32
"""... but so many of the last are used however old they are."""
MIN_ALIKE = 8
"""Ends of requests of one kind (same max_tokens and priority) that make a distribution of their own."""


class Drawn(msgspec.Struct, frozen=True):
    """A request to come."""

    at: float
    like: ArrivalSample
    num_output_tokens: int


class Lengths:
    """Distribution of output lengths for one kind of request (Kaplan-Meier): who is still at it counts as such.

    Without them short answers would be over-represented, since the long ones of the same age are still running.
    """

    def __init__(self, ended: Sequence[int], live: Sequence[int]) -> None:
        """`ended`: lengths where answers ended by themselves; `live`: what those have that haven't."""
        deaths, num_at_risk = Counter(ended), len(ended) + len(live)
        still = Counter(live)
        self._lengths: list[int] = []
        self._survival: list[float] = []
        """Share of requests longer than the length at the same place."""
        survival = 1.0
        for length in sorted(set(deaths) | set(still)):
            if deaths[length]:
                survival *= 1.0 - deaths[length] / num_at_risk
                self._lengths.append(length)
                self._survival.append(survival)
            num_at_risk -= deaths[length] + still[length]

    def draw(self, longer_than: int, u: float) -> int | None:
        """A length above `longer_than`; `u` in [0, 1) chooses. None: beyond what has been seen."""
        place = bisect_right(self._lengths, longer_than)
        here = self._survival[place - 1] if place else 1.0
        for length, survival in zip(self._lengths[place:], self._survival[place:], strict=True):
            if survival <= here * (1.0 - u):
                return length
        return None


class AnswerLengths:
    """Where answers end, by kind of request."""

    def __init__(self, state: EngineState) -> None:
        self._ends = state.ends
        self._live = [saved for saved in state.requests if saved.num_output_tokens]
        self._by_kind: dict[tuple[int, int] | None, Lengths] = {}

    def draw(self, max_tokens: int, priority: int, longer_than: int, u: float) -> int:
        """Output tokens of a request of that kind that has `longer_than` already."""
        drawn = self._of((max_tokens, priority)).draw(longer_than, u)
        return max_tokens if drawn is None else min(drawn, max_tokens)

    def _of(self, kind: tuple[int, int]) -> Lengths:
        if kind not in self._by_kind:
            alike = [end for end in self._ends if (end.max_tokens, end.priority) == kind]
            self._by_kind[kind] = self._lengths(alike, kind) if len(alike) >= MIN_ALIKE else self._of_all()
        return self._by_kind[kind]

    def _of_all(self) -> Lengths:
        if None not in self._by_kind:
            self._by_kind[None] = self._lengths(self._ends, None)
        return self._by_kind[None]

    def _lengths(self, ended: Sequence[EndSample], kind: tuple[int, int] | None) -> Lengths:
        """Who reached its max_tokens would have gone on: where such an answer ends by itself isn't known either."""
        going_on = [
            saved.num_output_tokens
            for saved in self._live
            if kind is None or (saved.max_output_tokens, saved.priority) == kind
        ]
        going_on += [end.num_output_tokens for end in ended if end.num_output_tokens >= end.max_tokens]
        return Lengths([end.num_output_tokens for end in ended if end.num_output_tokens < end.max_tokens], going_on)


class Future:
    """One draw."""

    def __init__(self, state: EngineState, horizon_s: float, seed: int, window_s: float = WINDOW_S) -> None:
        rng = random.Random(seed)
        self._lengths = AnswerLengths(state)
        self._endings = {
            saved.request_id: self._lengths.draw(
                saved.max_output_tokens, saved.priority, saved.num_output_tokens, rng.random()
            )
            for saved in state.requests
        }
        recent = recent_arrivals(state, window_s)
        loop = closed_loop(state, recent)
        self.is_closed = loop is not None
        """Whether each arrival is taken to be the answer to an end."""
        self._delays = loop.delays if loop is not None else []
        self._rng = rng
        self._until = state.mono + horizon_s
        gaps = _gaps(state, recent, rng)
        place = _next_place(state, recent, gaps, rng)
        self._shapes = _in_turn(recent, place)
        self._owed: deque[float] = deque()
        """Closed loop: when those come whose predecessors have ended."""
        if loop is not None:
            self.note_ends(loop.num_clients - len(state.requests) - state.num_left_out, state.mono)
        self._times = iter(()) if self.is_closed or not gaps else _replayed(state, recent, gaps, place, rng)
        self._next = next(self._times, None)

    def ending(self, saved: RequestState) -> int:
        """Output tokens with which a live request will end."""
        return self._endings[saved.request_id]

    @property
    def next_at(self) -> float | None:
        """When the next arrival comes; None: none within the horizon, as things stand."""
        due = self._owed[0] if self._owed else self._next
        return due if due is not None and due < self._until else None

    def take_due(self, now: float) -> Iterator[Drawn]:
        """The arrivals up to `now`, each once."""
        while (at := self.next_at) is not None and at <= now:
            if self._owed:
                self._owed.popleft()
            else:
                self._next = next(self._times, None)
            like = next(self._shapes)
            yield Drawn(at, like, self._lengths.draw(like.max_tokens, like.priority, 0, self._rng.random()))

    def note_ends(self, count: int, now: float) -> None:
        """So many requests have ended: with a closed loop, as many will come."""
        if self.is_closed:
            self._owed.extend(sorted(now + self._rng.choice(self._delays) for _ in range(count)))


def recent_arrivals(state: EngineState, window_s: float = WINDOW_S) -> list[ArrivalSample]:
    """The arrivals that say what comes next."""
    num_young = sum(sample.at >= state.mono - window_s for sample in state.arrivals)
    return state.arrivals[-max(num_young, MIN_RECENT) :]


def in_words(state: EngineState) -> str:
    """What the arrivals are taken for."""
    recent = recent_arrivals(state)
    if len(recent) < 2:
        return "none"
    if (loop := closed_loop(state, recent)) is not None:
        return f"a closed loop of {loop.num_clients} clients: each end brings the next request"
    return f"{len(recent) / _cycle_s(state, recent):.3g} a second, as the last {len(recent)} came"


def _in_turn(recent: Sequence[ArrivalSample], place: int) -> Iterator[ArrivalSample]:
    """Shapes in their order from a place on, again and again: what came in a row comes in a row."""
    while recent:
        yield recent[place]
        place = (place + 1) % len(recent)


def _cycle_s(state: EngineState, recent: Sequence[ArrivalSample]) -> float:
    """Seconds in which as many requests come as are in `recent`."""
    span = recent[-1].at - recent[0].at
    return max(1e-3, state.mono - recent[0].at, span * len(recent) / (len(recent) - 1))


def _gaps(state: EngineState, recent: Sequence[ArrivalSample], rng: random.Random) -> list[float]:
    """Seconds before each of the recent arrivals; before the first one, what could well have been."""
    if len(recent) < 2:
        return []
    gaps = [later.at - earlier.at for earlier, later in pairwise(recent)]
    longer = [gap for gap in gaps if gap > state.mono - recent[-1].at]
    return [rng.choice(longer) if longer else _cycle_s(state, recent) - sum(gaps), *gaps]


def _next_place(state: EngineState, recent: Sequence[ArrivalSample], gaps: Sequence[float], rng: random.Random) -> int:
    """Which of the recent arrivals the next one is like: one that let wait for longer than we have waited by now."""
    if not recent:
        return 0
    waited = state.mono - recent[-1].at
    return rng.choice([place for place, gap in enumerate(gaps) if place and gap > waited] or range(len(recent)))


def _replayed(
    state: EngineState, recent: Sequence[ArrivalSample], gaps: Sequence[float], place: int, rng: random.Random
) -> Iterator[float]:
    """The recent gaps in a rotation: bursts stay bursts, and a regular beat stays one and keeps its phase."""
    at = recent[-1].at + gaps[place]
    if at <= state.mono:
        at = state.mono + gaps[place] * rng.random()
    while True:
        yield at
        place = (place + 1) % len(gaps)
        at += gaps[place]


class ClosedLoop(msgspec.Struct, frozen=True):
    """Clients that each send the next request when they have their answer."""

    num_clients: int
    delays: list[float]
    """Seconds from an end to the arrival it brings, sorted."""


def closed_loop(state: EngineState, recent: Sequence[ArrivalSample]) -> ClosedLoop | None:
    """The closed loop by which requests come; None if that isn't how.

    Signs of it: after arrivals the number of live requests is nearly always the same, and the wait for the next one is
    short against the time that requests stay.
    """
    arrivals, ends = [sample.at for sample in recent], [end.at for end in state.ends]
    if len(arrivals) < 10 or len(ends) < 10:
        return None
    since = max(arrivals[0], ends[0])
    counts = _live_after_arrivals(state, since, arrivals, ends)
    most = max(counts, default=0)
    if len(counts) < 5 or counts.count(most) < 0.6 * len(counts) or min(counts) < 0.7 * most:
        return None
    answered = [at for at in arrivals if at >= since]
    delays = _delays(answered, [at for at in ends if at >= since])
    stay_s = most * (state.mono - since) / len(answered)  # Little's law
    if len(delays) < 5 or delays[int(0.9 * len(delays))] > 0.1 * stay_s:
        return None
    return ClosedLoop(most, delays)


def _live_after_arrivals(
    state: EngineState, since: float, arrivals: Sequence[float], ends: Sequence[float]
) -> list[int]:
    """Live requests after each arrival, from the newest back; of several in a row, after the last of them."""
    live = len(state.requests) + state.num_left_out
    counts, is_last = [], True
    for at, is_arrival in sorted([(at, True) for at in arrivals] + [(at, False) for at in ends], reverse=True):
        if at <= since:
            break
        if is_arrival and is_last:
            counts.append(live)
        is_last = not is_arrival
        live += -1 if is_arrival else 1
    return counts


def _delays(arrivals: Sequence[float], ends: Sequence[float]) -> list[float]:
    """Each arrival matched with the oldest end that no arrival has answered yet; sorted."""
    unanswered, delays = deque(ends), []
    for at in arrivals:
        if unanswered and unanswered[0] <= at:
            delays.append(at - unanswered.popleft())
    return sorted(delays)
