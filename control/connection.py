"""One client's connection: bytes between the socket and its session, and what waits for a client that reads slowly.

Only replies are ever queued. Tokens are joined, events and step records stay in the shared streams until they are
wanted, and a snapshot is made only when the one before has left. So a reader that stalls costs bounded memory, and
past `MAX_UNREAD_BYTES` or `MAX_UNREAD_UNITS` it is cut with a reason. Nobody ever waits for it.
"""

import asyncio
import logging
import os
import time
from collections.abc import Iterable
from typing import Protocol

from schedtop.control.audit import Actor
from schedtop.control.coalesce import TokenBuffer
from schedtop.control.errors import BadFrame, NotAllowed
from schedtop.control.framing import encode_frame
from schedtop.control.messages import (
    AbortRequests,
    Envelope,
    ErrorReply,
    FromServer,
    Reply,
    Subscribe,
    TokenBatch,
    TokenOutput,
    Welcome,
)
from schedtop.control.session import ServerSession, SessionState
from schedtop.control.unix_socket import peer_uid
from schedtop.engine.errors import SchedtopError

logger = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 8 << 20
"""Replies that may wait for a client; past it, it is cut."""
MAX_UNREAD_UNITS = 1 << 20
"""Tokens and log-probabilities that may wait for a client; past it, it is cut."""
PAUSE_BYTES = 256 << 10
"""With more than this unread, no further commands are taken from a client."""
MAX_UNANSWERED = 1024
"""Commands of one client under way; further ones stay in its socket."""
GREETING_S = 10.0
"""How long a client may take to introduce itself."""
CLOSE_S = 1.0
"""How long a closed connection may take to deliver what was sent."""


class Host(Protocol):
    """What a connection needs of the server."""

    def welcome(self, read_only: bool) -> Welcome:
        """The answer to a greeting."""
        ...

    @property
    def step(self) -> int:
        """The newest step heard of."""
        ...

    def connected(self, connection: "Connection") -> None:
        """A connection is there."""
        ...

    def take(self, connection: "Connection", envelope: Envelope, why_not: SchedtopError | None = None) -> None:
        """A command has come; with `why_not` it is only to be recorded and answered."""
        ...

    def ready(self) -> None:
        """A connection can be written to again."""
        ...

    def disconnected(self, connection: "Connection") -> None:
        """A connection is gone."""
        ...


def stamped_frame(message: FromServer, step: int) -> bytes:
    """A message as it leaves: with the time, and the newest step heard of."""
    message.mono, message.wall = time.monotonic(), time.time()
    if not isinstance(message, TokenBatch):  # which tells the step its tokens are of
        message.step = step
    return encode_frame(message)


class Connection(asyncio.Protocol):
    """The server's end of a client's socket."""

    def __init__(self, host: Host) -> None:
        self.session = ServerSession(host.welcome)
        self.uid: int | None = None
        self.tokens = TokenBuffer()
        self.request_ids: set[str] = set()
        """Live requests that this client submitted."""
        self.subscription: Subscribe | None = None
        self.next_snapshot_at = 0.0
        self.awaits_snapshot = False
        self.step_place = 0
        self.event_place = 0
        self.asked_place = 0
        """As `step_place`, for snapshots that it asked for one by one."""
        self.refusal: SchedtopError | None = None
        """Why this connection isn't wanted: told when the client speaks, so that it is there to hear it."""
        self._host = host
        self._transport: asyncio.Transport | None = None
        self._is_blocked = False

    def __repr__(self) -> str:
        return f"<Connection {self.session.client or '?'} uid={self.uid} {self.session.state}>"

    def actor(self, on_behalf_of: str) -> Actor:
        """Who speaks, for the audit log."""
        return Actor(uid=self.uid, client=self.session.client, on_behalf_of=on_behalf_of[:64])

    def only_withdraws(self, envelope: Envelope) -> bool:
        """Whether a command does no more than to abort requests that this client itself submitted, for nobody else."""
        command = envelope.command
        if envelope.on_behalf_of or not isinstance(command, AbortRequests) or not command.select.ids:
            return False
        return self.request_ids.issuperset(command.select.ids)

    @property
    def is_ready(self) -> bool:
        """Whether the client has read everything sent so far, as far as the system can tell."""
        return not self._is_blocked and self.session.state is SessionState.OPEN

    # ---- asyncio's calls ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=0)
        self._transport = transport
        self.uid = peer_uid(transport.get_extra_info("socket"))
        asyncio.get_running_loop().call_later(GREETING_S, self._check_greeted)
        self._host.connected(self)
        if self.uid not in (None, os.getuid(), 0):
            self.refusal = NotAllowed(f"uid {self.uid} may not control this engine")

    def data_received(self, data: bytes) -> None:
        if self.refusal is not None:
            self.refuse_and_close(self.refusal)
            return
        self.session.feed(data)
        while (envelope := self.session.next_command()) is not None:
            self._flush_session()  # what comes before it in the conversation leaves before its answer
            self._host.take(self, envelope)
        self._flush_session()
        forbidden, self.session.forbidden = self.session.forbidden, []
        for envelope, why in forbidden:
            self._host.take(self, envelope, why)
        self._regulate()

    def pause_writing(self) -> None:
        self._is_blocked = True

    def resume_writing(self) -> None:
        self._is_blocked = False
        self._regulate()
        self._host.ready()

    def connection_lost(self, error: Exception | None) -> None:
        self.session.state = SessionState.CLOSED
        self._transport = None
        self._host.disconnected(self)

    # ---- to the client --------------------------------------------------------------------------------------

    def reply(self, message: Reply) -> None:
        """Answer a command; never dropped while the client is there."""
        self.send(self.session.reply(message))
        self._regulate()

    def refuse(self, number: int, error: SchedtopError) -> None:
        """Answer a command with an error."""
        self.reply(ErrorReply(id=number, code=error.code, message=str(error)))

    def send(self, message: FromServer) -> None:
        """Hand a message to the system; cut the client if too much is waiting for it."""
        self.send_frame(stamped_frame(message, self._host.step))

    def send_frame(self, frame: bytes) -> None:
        """As `send`, for what has been encoded once for several clients."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(frame)
        num_unread = self._transport.get_write_buffer_size()
        if num_unread > MAX_UNREAD_BYTES:
            self.cut(f"{num_unread} bytes are waiting to be read, the limit is {MAX_UNREAD_BYTES}: read faster")

    def add_tokens(self, step: int, outputs: Iterable[TokenOutput]) -> None:
        """Keep a step's tokens until `send_tokens`."""
        self.tokens.add(step, outputs)
        if self.tokens.num_units > MAX_UNREAD_UNITS:
            self.cut(f"{self.tokens.num_units} tokens are waiting to be read, the limit is {MAX_UNREAD_UNITS}")

    def send_tokens(self) -> None:
        """Send what tokens there are, if the client keeps up."""
        if self.tokens and self.is_ready:
            self.send(self.tokens.take())

    def cut(self, reason: str) -> None:
        """End the connection, telling why if the client still listens."""
        if self.session.state is not SessionState.CLOSED:
            logger.warning("%r is cut: %s", self, reason)
        self.close(reason)

    def refuse_and_close(self, error: SchedtopError) -> None:
        """End a connection that isn't wanted, telling why."""
        self.session.refuse_and_close(error)
        self._flush_session()

    def close(self, reason: str) -> None:
        """Say goodbye and end the connection; returns at once, what can't be delivered soon is lost."""
        self.session.close(reason)
        self._flush_session()

    def _check_greeted(self) -> None:
        if self.session.state is SessionState.GREETING:
            self.refuse_and_close(BadFrame(f"no Hello came within {GREETING_S:g} s"))

    def _flush_session(self) -> None:
        outgoing, self.session.outgoing = self.session.outgoing, []
        if self._transport is None or self._transport.is_closing():
            return
        for message in outgoing:
            self._transport.write(stamped_frame(message, self._host.step))
        if self.session.state is SessionState.CLOSED:
            self._transport.close()
            asyncio.get_running_loop().call_later(CLOSE_S, self._transport.abort)

    def _regulate(self) -> None:
        """Take no more commands from a client that leaves its answers unread, or has very many under way."""
        if self._transport is None or self._transport.is_closing():
            return
        is_full = self._transport.get_write_buffer_size() > PAUSE_BYTES or self.session.num_unanswered >= MAX_UNANSWERED
        if is_full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
