"""Errors of the control socket, on either side of it. What the engine itself refuses is in `schedtop.engine.errors`.

Each message names what was wrong, the limit and the way out. `code` is what goes over the wire.
"""

from schedtop.engine.errors import SchedtopError


class BadFrame(SchedtopError):
    """Bytes that aren't a message of this protocol. `reply_id`: the envelope's number, where it could be read."""

    code = "bad_frame"

    def __init__(self, message: str, reply_id: int | None = None) -> None:
        super().__init__(message)
        self.reply_id = reply_id


class FrameTooLong(BadFrame):
    """A frame announced longer than the receiver takes; the stream can't go on after it."""

    code = "frame_too_long"


class NotAllowed(SchedtopError):
    """A command this connection gave up the right to, or a peer that may not connect."""

    code = "not_allowed"


class ShuttingDown(SchedtopError):
    """The engine is ending and takes no new work."""

    code = "shutting_down"


class CommandRefused(SchedtopError):
    """Raised in the client: the server answered with an `ErrorReply`. The engine is as it was."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Disconnected(SchedtopError):
    """Raised in the client: the connection is gone."""

    code = "disconnected"

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NoReply(SchedtopError):
    """Raised in the client: no answer in time. The command may still take effect."""

    code = "no_reply"


class NoEngine(SchedtopError):
    """No engine could be found, or not exactly one."""

    code = "no_engine"


class SocketRefused(SchedtopError):
    """A socket path the server won't use: taken, foreign, unsafe or too long."""

    code = "socket_refused"
