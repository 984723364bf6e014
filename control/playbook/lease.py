"""The runner's lease on its changes: renewed while this process lives, so that the engine undoes them if it dies."""

import asyncio
import contextlib
import uuid

from schedtop.control.errors import Disconnected
from schedtop.control.messages import Ack, EndLease, HoldLease
from schedtop.control.playbook.target import Target
from schedtop.engine.errors import SchedtopError

LEASE_S = 20.0
"""How long an engine waits for a runner that has fallen silent before it undoes what that runner did."""
RENEWALS = 4
"""So often within that time it is renewed."""


class RunnerLease:
    """One lease for one run. An engine that takes no leases gets none: `lease_id` stays empty."""

    def __init__(self, target: Target, reason: str, lease_s: float = LEASE_S) -> None:
        self.lease_id = ""
        self._target = target
        self._reason = reason
        self._lease_s = lease_s
        self._task: asyncio.Task[None] | None = None
        self._why_lost = ""

    async def begin(self) -> bool:
        """Take the lease; False if this engine has none to give."""
        if not self._target.can(HoldLease):
            return False
        self.lease_id = f"run-{uuid.uuid4().hex}"
        await self._hold()
        self._task = asyncio.create_task(self._renew(), name="playbook-lease")
        return True

    def check(self) -> None:
        """Raise `Disconnected` if the engine has taken our changes back meanwhile."""
        if self._why_lost:
            raise Disconnected(self._why_lost)

    async def end(self) -> None:
        """Stop renewing and keep what was done; idempotent. Without an engine there is nobody to tell."""
        if self._task is None:
            return
        self._task.cancel()
        self._task = None
        with contextlib.suppress(SchedtopError):
            await self._target.request(EndLease(lease_id=self.lease_id, reason=self._reason))

    def abandon(self) -> None:
        """Stop renewing and say nothing: the engine undoes what was done when the lease has run out."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _hold(self) -> bool:
        """Begin or renew; whether it was there already."""
        command = HoldLease(lease_id=self.lease_id, within_s=self._lease_s, reason=self._reason)
        ack = await self._target.request(command, timeout_s=self._lease_s)
        assert isinstance(ack, Ack)
        return not ack.data.get("is_new", False)

    async def _renew(self) -> None:
        while not self._why_lost:
            await asyncio.sleep(self._lease_s / RENEWALS)
            with contextlib.suppress(SchedtopError):  # the run itself finds out that the engine is gone
                if not await self._hold():
                    self._why_lost = (
                        f"this runner was silent for over {self._lease_s:g} s: the engine has taken its changes back"
                    )
