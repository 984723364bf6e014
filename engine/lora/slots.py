"""Adapter (LoRA) slots: how many different adapters may run at once. The weights are the runner's business.

Only running requests count. A request whose adapter has no slot waits without holding up those behind it, but not
for ever: once `max_bypass` later requests have taken slots past it, no later one may. The first one met of those that
wait for an adapter stands for all of them, so that the cost doesn't grow with how many wait.
"""

from collections import Counter

from schedtop.engine.request import Request


class AdapterSlots:
    """Counts the adapters in use; 0 slots = the engine has no adapters and no request names one.

    Methods that return requests name those worth another look, now that something has changed for them.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._in_use: Counter[str] = Counter()
        self._waiting: dict[str, dict[str, Request]] = {}
        """Adapter -> requests that wait for it, as they were met."""
        self._num_passes: Counter[str] = Counter()
        """Adapter -> how many later requests have taken slots past those who wait for it."""

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
        if has_slot and all(self._num_passes[other] < max_bypass for other in self._ahead_of(request)):
            return True
        self._waiting.setdefault(adapter, {})[request.request_id] = request
        return False

    def take(self, request: Request) -> list[Request]:
        """A request starts to run: others with its adapter may as well."""
        adapter = request.adapter
        if adapter is None:
            return []
        for other in self._ahead_of(request):
            self._num_passes[other] += 1
        self._in_use[adapter] += 1
        self._num_passes.pop(adapter, None)
        return list(self._waiting.pop(adapter, {}).values())

    def give_back(self, request: Request) -> list[Request]:
        """A request runs no more."""
        adapter = request.adapter
        if adapter is None:
            return []
        self._in_use[adapter] -= 1
        if self._in_use[adapter]:
            return []
        del self._in_use[adapter]
        return self._firsts()

    def forget(self, request: Request) -> list[Request]:
        """A request waits for a slot no more: it is gone, held, or about to run."""
        adapter = request.adapter
        group = self._waiting.get(adapter) if adapter is not None else None
        if adapter is None or group is None or group.pop(request.request_id, None) is None:
            return []
        if not group:
            del self._waiting[adapter]
            self._num_passes.pop(adapter, None)
        return self._firsts()

    def _firsts(self) -> list[Request]:
        """Of each adapter waited for, the request that comes first in the queue."""
        return [min(group.values(), key=lambda request: request.queue_key) for group in self._waiting.values()]

    def _ahead_of(self, request: Request) -> list[str]:
        """Adapters waited for by somebody ahead of this request."""
        key = request.queue_key
        return [
            adapter
            for adapter, group in self._waiting.items()
            if adapter != request.adapter and next(iter(group.values())).queue_key < key
        ]
