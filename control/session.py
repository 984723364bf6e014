"""One client's conversation as the server sees it. Sans-I/O: bytes in, commands out, answers to everything improper.

    GREETING --Hello--> OPEN --close--> CLOSED        (anything else than Hello, or a wrong version, closes)

Rules kept here: hello first; a read-only connection changes nothing; every envelope gets exactly one reply; a number
isn't used twice at once. What commands do is not here (`operations.py`), nor sockets (`connection.py`).
"""

from collections.abc import Callable
from enum import StrEnum

from schedtop.control.errors import BadFrame, FrameTooLong, NotAllowed
from schedtop.control.framing import MAX_HELLO_BYTES, MAX_REQUEST_BYTES, FrameReader, decode_from_client
from schedtop.control.messages import (
    PROTOCOL_VERSION,
    DumpSteps,
    Envelope,
    ErrorReply,
    FromServer,
    GetAudit,
    GetInfo,
    GetSnapshot,
    GetState,
    GetStepModel,
    Goodbye,
    Hello,
    Reply,
    SelfCheck,
    Subscribe,
    Welcome,
)
from schedtop.engine.errors import SchedtopError

READ_ONLY_COMMANDS = (Subscribe, GetSnapshot, GetInfo, DumpSteps, GetStepModel, GetState, GetAudit, SelfCheck)
"""What a connection may send that gave up the right to change anything."""
MAX_CLIENT_NAME = 64
"""Longest name a client may introduce itself with, in characters: it goes into every audit row."""


class SessionState(StrEnum):
    """Where the conversation stands."""

    GREETING = "greeting"
    OPEN = "open"
    CLOSED = "closed"


class ServerSession:
    """Turns a client's bytes into commands. `welcome(read_only)` makes the answer to its greeting.

    What the session has to say by itself (the welcome, a goodbye, that something can't be read) is left in `outgoing`.
    """

    def __init__(self, welcome: Callable[[bool], Welcome]) -> None:
        self.state = SessionState.GREETING
        self.client = ""
        self.read_only = False
        self.outgoing: list[FromServer] = []
        self.forbidden: list[tuple[Envelope, NotAllowed]] = []
        """Commands that a read-only connection may not give, and why: to be recorded, then answered."""
        self._welcome = welcome
        self._reader = FrameReader(MAX_HELLO_BYTES)
        self._unanswered: set[int] = set()

    @property
    def num_unanswered(self) -> int:
        """Commands received and not replied to."""
        return len(self._unanswered)

    def feed(self, data: bytes) -> None:
        """Take what came from the client."""
        self._reader.feed(data)

    def next_command(self) -> Envelope | None:
        """The next proper command; None if there is none yet. What was improper before it is in `outgoing`."""
        try:
            while self.state is not SessionState.CLOSED and (body := self._reader.next_frame()) is not None:
                if (envelope := self._take(body)) is not None:
                    return envelope
        except FrameTooLong as error:
            self.refuse_and_close(error)
        return None

    def reply(self, message: Reply) -> Reply:
        """Note that an envelope is answered; returns the message to send."""
        assert message.id is not None
        self._unanswered.remove(message.id)
        return message

    def close(self, reason: str) -> None:
        """Say goodbye; nothing is received after it."""
        if self.state is not SessionState.CLOSED:
            self.state = SessionState.CLOSED
            self.outgoing.append(Goodbye(reason=reason))

    def refuse_and_close(self, error: SchedtopError) -> None:
        """Answer the one thing wrong and end the conversation."""
        self.outgoing.append(ErrorReply(id=None, code=error.code, message=str(error)))
        self.close(str(error))

    def _take(self, body: bytes) -> Envelope | None:
        try:
            message = decode_from_client(body)
        except BadFrame as error:
            if self.state is SessionState.GREETING or error.reply_id is None:
                self.refuse_and_close(error)
            else:
                self._refuse(error.reply_id, error)
            return None
        if isinstance(message, Hello):
            self._greet(message)
            return None
        return self._admit(message)

    def _greet(self, hello: Hello) -> None:
        if self.state is not SessionState.GREETING:
            self.refuse_and_close(BadFrame("Hello was said already"))
        elif hello.protocol != PROTOCOL_VERSION:
            self.refuse_and_close(
                BadFrame(
                    f"this server speaks protocol version {PROTOCOL_VERSION}, the client version {hello.protocol}; "
                    "use a client of the engine's version"
                )
            )
        elif not 0 < len(hello.client) <= MAX_CLIENT_NAME:
            self.refuse_and_close(
                BadFrame(f"a client's name has 1 to {MAX_CLIENT_NAME} characters, this one has {len(hello.client)}")
            )
        else:
            self.state, self.client, self.read_only = SessionState.OPEN, hello.client, hello.read_only
            self._reader.max_bytes = MAX_REQUEST_BYTES
            self.outgoing.append(self._welcome(hello.read_only))

    def _admit(self, envelope: Envelope) -> Envelope | None:
        if self.state is SessionState.GREETING:
            self.refuse_and_close(BadFrame("the first message must be Hello"))
            return None
        if envelope.id in self._unanswered:
            self.refuse_and_close(BadFrame(f"number {envelope.id} is still unanswered; give each command its own"))
            return None
        self._unanswered.add(envelope.id)
        if self.read_only and not isinstance(envelope.command, READ_ONLY_COMMANDS):
            name = type(envelope.command).__name__
            why = NotAllowed(f"this connection is read-only: {name} wasn't carried out")
            self.forbidden.append((envelope, why))
            return None
        return envelope

    def _refuse(self, reply_id: int, error: SchedtopError) -> None:
        self.outgoing.append(ErrorReply(id=reply_id, code=error.code, message=str(error)))
