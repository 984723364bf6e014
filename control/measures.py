"""What the server measures for watchers beside what the engine publishes: exact latencies, peaks between looks."""

import msgspec


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    """Exact percentiles over a window, in seconds; `count` samples."""

    count: int
    p50: float
    p90: float
    p99: float
    max: float


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """One latency over the last 10 s and the last 60 s; None = no sample in that window."""

    now: Percentiles | None = None
    minute: Percentiles | None = None


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """The largest values at the ends of `num_steps` steps: what a reader that looks now and then would miss."""

    num_steps: int
    running: int
    waiting: int
    blocks_in_use: int

    def joined(self, other: "Peaks | None") -> "Peaks":
        """Of these steps and those of `other`, which are different ones."""
        if other is None:
            return self
        return Peaks(
            num_steps=self.num_steps + other.num_steps,
            running=max(self.running, other.running),
            waiting=max(self.waiting, other.waiting),
            blocks_in_use=max(self.blocks_in_use, other.blocks_in_use),
        )
