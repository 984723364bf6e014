"""Adapter (LoRA) slots: how many different adapters may run at once. The weights are the runner's business.

Only running requests count. A request whose adapter has no slot waits without holding up those behind it, but not
for ever: once `max_bypass` later requests have taken slots past it, no later one may.
"""

from collections import Counter

from schedtop.engine.request import Request


class AdapterSlots:
    """Counts the adapters in use; 0 slots = the engine has no adapters and no request names one."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._in_use: Counter[str] = Counter()
        self._waiting: dict[str, Request] = {}
        """Requests deferred for want of a slot, in the order in which they were met."""

    @property
    def num_in_use(self) -> int:
        """Different adapters among the running requests."""
        return len(self._in_use)

    def admits(self, request: Request, max_bypass: int) -> bool:
        """Whether a request may run as far as slots go; remembers it as waiting when not."""
        adapter = request.adapter
        if adapter is None:
            return True
        has_slot = adapter in self._in_use or len(self._in_use) < self.num_slots
        is_fair = all(ahead.num_bypassed < max_bypass for ahead in self._ahead_of(request))
        if has_slot and is_fair:
            return True
        self._waiting[request.request_id] = request
        return False

    def take(self, request: Request) -> None:
        """A request starts to run."""
        if request.adapter is None:
            return
        self._waiting.pop(request.request_id, None)
        for ahead in self._ahead_of(request):
            ahead.num_bypassed += 1
        self._in_use[request.adapter] += 1

    def give_back(self, request: Request) -> list[Request]:
        """A request runs no more; returns the waiting ones worth another look."""
        if request.adapter is None:
            return []
        self._in_use[request.adapter] -= 1
        if self._in_use[request.adapter]:
            return []
        del self._in_use[request.adapter]
        waiting, self._waiting = list(self._waiting.values()), {}
        return waiting

    def forget(self, request: Request) -> None:
        """A waiting request is gone."""
        self._waiting.pop(request.request_id, None)

    def _ahead_of(self, request: Request) -> list[Request]:
        return [other for other in self._waiting.values() if other.queue_key < request.queue_key]
