"""The screen's only way to an engine: connects, greets, reconnects, asks. The only asynchronous I/O of the screen."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from schedtop.control.errors import CommandRefused, Disconnected, NoReply
from schedtop.control.messages import AnyCommand, Goodbye, Reply
from schedtop.tui.state import LinkDown, LinkEvent, LinkUp, Received

if TYPE_CHECKING:
    from schedtop.control.client import Client

RETRY_FIRST_S, RETRY_MOST_S = 0.5, 5.0
Post = Callable[[LinkEvent], None]


@dataclass(frozen=True, slots=True)
class Refusal:
    """A command that was not carried out, and why."""

    code: str
    message: str


class Link(Protocol):
    """One engine's connection as the screen sees it."""

    @property
    def target(self) -> str:
        """The address, as a person would type it."""
        ...

    async def run(self, post: Post) -> None:
        """Stay connected until cancelled, posting what happens."""
        ...

    async def request(self, command: AnyCommand) -> Reply | Refusal:
        """Send a command and wait for its reply; never raises."""
        ...


class ClientLink:
    """A `Link` over the control socket (or a gateway's WebSocket)."""

    def __init__(self, target: str, read_only: bool = False) -> None:
        self._target = target
        self._read_only = read_only
        self._client: Client | None = None

    @property
    def target(self) -> str:
        """The address, as a person would type it."""
        return self._target

    async def run(self, post: Post) -> None:
        """Connect, hand over messages, and connect again for ever, waiting longer after each failure."""
        wait_s = RETRY_FIRST_S
        while True:
            try:
                reason = await self._session(post)
                wait_s = RETRY_FIRST_S
            except (OSError, Disconnected, CommandRefused) as failure:
                reason = str(failure) or type(failure).__name__
            post(LinkDown(self._target, reason, wait_s))
            await asyncio.sleep(wait_s)
            wait_s = min(RETRY_MOST_S, wait_s * 1.6)

    async def _session(self, post: Post) -> str:
        from schedtop.control.client import Client

        client = await Client.connect(self._target, name="tui", read_only=self._read_only)
        self._client = client
        try:
            post(LinkUp(self._target, client.welcome))
            async for message in client.messages():
                if isinstance(message, Goodbye):
                    return f"the engine said goodbye: {message.reason}"
                post(Received(self._target, message))
            return "the connection was closed"
        finally:
            self._client = None
            await client.close()

    async def request(self, command: AnyCommand) -> Reply | Refusal:
        """Send a command and wait for its reply; never raises."""
        if self._client is None:
            return Refusal("disconnected", "not connected to the engine: nothing was changed")
        try:
            return await self._client.request(command)
        except CommandRefused as refusal:
            return Refusal(refusal.code, refusal.message)
        except NoReply as silence:
            return Refusal(silence.code, str(silence))
        except (OSError, Disconnected) as failure:
            return Refusal("disconnected", f"connection lost before an answer came ({failure}): it may or may not hold")
