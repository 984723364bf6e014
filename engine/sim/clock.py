"""A clock that stands still until it is moved."""


class VirtualClock:
    """Seconds since the start of a simulation. Call it to read it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    def jump_to(self, moment: float) -> None:
        """Go to a later moment; never back."""
        self.now = max(self.now, moment)
