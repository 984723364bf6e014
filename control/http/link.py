"""The gateway's connection to the engine: reconnects, hands tokens to their streams, keeps the newest snapshot.

What comes from the engine is put into memory of bounded size and taken from there by handlers; nothing in here ever
waits for an HTTP client. No HTTP in here.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import ParamSpec

from schedtop.control.client import Client, Message
from schedtop.control.errors import CommandRefused, Disconnected, NoReply
from schedtop.control.messages import (
    AbortRequests,
    Ack,
    AnyCommand,
    EventBatch,
    GetSnapshot,
    Goodbye,
    KnobsAck,
    RequestFilter,
    SnapshotReply,
    SnapshotUpdate,
    Subscribe,
    TokenBatch,
    TokenOutput,
    Welcome,
)
from schedtop.engine.snapshot import NO_ROWS

logger = logging.getLogger(__name__)

SNAPSHOT_INTERVAL_S = 0.5
RETRY_DELAYS_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Waits between attempts to reach an engine; the last one repeats."""
COMMAND_TIMEOUT_S = 30.0
MAX_PENDING_VALUES = 65_536
"""Tokens and log-probabilities that may wait for one slow client; past it the answer is cut."""


Reply = Ack | KnobsAck | SnapshotReply


class SlowReader(Exception):
    """A client that doesn't take its tokens; its answer is cut to keep memory bounded."""


class TokenStream:
    """Tokens of one HTTP request's sequences, waiting for its handler."""

    def __init__(self, on_cut: Callable[[], None] = lambda: None) -> None:
        self._on_cut = on_cut
        self._pending: deque[TokenOutput] = deque()
        self._num_values = 0
        self._failure: Exception | None = None
        self._news = asyncio.Event()
        self.ended: set[str] = set()
        """Requests whose last output has arrived, taken or not."""

    def put(self, output: TokenOutput) -> None:
        """Called as tokens arrive; never waits."""
        if output.finish_reason is not None:
            self.ended.add(output.request_id)
        if self._failure is not None:
            return
        self._num_values += _num_values(output)
        if self._num_values > MAX_PENDING_VALUES:
            self._pending.clear()
            self.fail(SlowReader(f"more than {MAX_PENDING_VALUES} tokens and log-probabilities were waiting"))
            self._on_cut()
            return
        self._pending.append(output)
        self._news.set()

    def fail(self, failure: Exception) -> None:
        """No more tokens will come."""
        self._failure = self._failure or failure
        self._news.set()

    async def take(self) -> list[TokenOutput]:
        """All that has arrived since the last call; waits for the first. Raises what the stream failed with."""
        await self._news.wait()
        self._news.clear()
        taken = list(self._pending)
        self._pending.clear()
        self._num_values = 0
        if self._failure is not None:
            self._news.set()
            if not taken:
                raise self._failure
        return taken


def _num_values(output: TokenOutput) -> int:
    return len(output.token_ids) + sum(map(len, output.logprobs or ()))


Told = ParamSpec("Told")


def tell(listeners: list[Callable[Told, None]], *message: Told.args, **named: Told.kwargs) -> None:
    """Tell everybody; a listener that fails (a metric, say) is logged and never ends serving."""
    for listener in listeners:
        try:
            listener(*message, **named)
        except Exception:
            logger.exception("%r failed", listener)


class EngineLink:
    """One connection for all inference requests, and what its subscription brings.

    `on_update` and `on_events` are called for each message, in order.
    """

    def __init__(self, target: str, name: str = "gateway") -> None:
        self.target = target
        self.latest: SnapshotUpdate | None = None
        self.latest_at = 0.0
        """When `latest` arrived, by this process's `time.monotonic()`."""
        self.on_update: list[Callable[[SnapshotUpdate], None]] = []
        self.on_events: list[Callable[[EventBatch], None]] = []
        self.on_welcome: list[Callable[[Welcome], None]] = []
        self.was_seen = asyncio.Event()
        """Set once an engine has been reached; `welcome` is there from then on."""
        self.was_lost = asyncio.Event()
        """Set while a connection that once was is gone."""
        self._name = name
        self._client: Client | None = None
        self._welcome: Welcome | None = None
        self._streams: dict[str, TokenStream] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    # ---- life -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to connect, in the background."""
        self._task = asyncio.create_task(self._run(), name="engine-link")

    async def close(self) -> None:
        """End the connection; live requests end with it."""
        self._lost(Disconnected("the gateway is shutting down"))
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @property
    def is_connected(self) -> bool:
        """Whether an engine answers on the other side."""
        return self._client is not None

    @property
    def welcome(self) -> Welcome:
        """The engine's introduction, of the last connection. Raises `Disconnected` before the first one."""
        if self._welcome is None:
            raise Disconnected(f"no engine has answered at {self.target} yet")
        return self._welcome

    async def _run(self) -> None:
        attempt = 0
        while True:
            try:
                client = await Client.connect(self.target, name=self._name)
            except (Disconnected, CommandRefused) as error:
                if attempt == 0:
                    logger.warning("no engine at %s: %s", self.target, error)
                await asyncio.sleep(RETRY_DELAYS_S[min(attempt, len(RETRY_DELAYS_S) - 1)])
                attempt += 1
                continue
            attempt = 0
            try:
                await self._serve(client)
            except Exception:
                logger.exception("serving %s failed by a fault of ours; connecting anew", self.target)
            await asyncio.sleep(RETRY_DELAYS_S[0])

    async def _serve(self, client: Client) -> None:
        """Take messages until the connection ends."""
        reason: Exception = Disconnected("the engine closed the connection")
        try:
            reader = asyncio.create_task(self._read(client), name="engine-messages")
            self._arrived(client)
            try:
                await client.request(Subscribe(interval_s=SNAPSHOT_INTERVAL_S, viewport=NO_ROWS))
                await reader
            finally:
                reader.cancel()
        except (Disconnected, CommandRefused, NoReply) as error:
            reason = error
        finally:
            self._client = None
            self.was_lost.set()
            self._lost(reason)
            await client.close()
        logger.warning("lost the engine at %s: %s", self.target, reason)

    async def _read(self, client: Client) -> None:
        async for message in client.messages():
            self._take(message)

    def _arrived(self, client: Client) -> None:
        self._client, self._welcome = client, client.welcome
        logger.info("connected to %s (%s)", client.welcome.info.name, self.target)
        tell(self.on_welcome, client.welcome)
        self.was_lost.clear()
        self.was_seen.set()

    def _lost(self, reason: Exception) -> None:
        gone = reason if isinstance(reason, Disconnected) else Disconnected(str(reason))
        for stream in self._streams.values():
            stream.fail(gone)
        self._streams.clear()

    # ---- what comes in ----------------------------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        match message:
            case TokenBatch():
                for output in message.outputs:
                    if (stream := self._streams.get(output.request_id)) is not None:
                        stream.put(output)
            case SnapshotUpdate():
                self._keep(message)
                tell(self.on_update, message)
            case EventBatch():
                tell(self.on_events, message)
            case Goodbye():
                raise Disconnected(message.reason)

    def _keep(self, update: SnapshotUpdate) -> None:
        self.latest, self.latest_at = update, time.monotonic()

    # ---- what goes out ----------------------------------------------------------------------------------------

    async def request(
        self, command: AnyCommand, timeout_s: float | None = COMMAND_TIMEOUT_S, *, on_behalf_of: str = ""
    ) -> Reply:
        """Send a command, wait for its reply. Raises `CommandRefused`, `Disconnected` or `NoReply`."""
        if self._client is None:
            raise Disconnected(f"no engine answers at {self.target}")
        return await self._client.request(command, timeout_s, on_behalf_of=on_behalf_of)

    async def refresh(self, timeout_s: float) -> bool:
        """Fetch a snapshot of this moment into `latest`; False if none came in time."""
        try:
            reply = await self.request(GetSnapshot(viewport=NO_ROWS), timeout_s)
        except (NoReply, Disconnected, CommandRefused):
            return False
        assert isinstance(reply, SnapshotReply)
        self._keep(reply.update)
        return True

    def latest_age_s(self) -> float:
        """Age of `latest`."""
        return time.monotonic() - self.latest_at

    def open_stream(self, request_ids: Iterable[str], stream: TokenStream) -> None:
        """Have the tokens of these requests put into `stream`; to be called before they are submitted."""
        self._streams.update((request_id, stream) for request_id in request_ids)

    def is_live(self, request_id: str) -> bool:
        """Whether a request of that id is being served by this gateway."""
        return request_id in self._streams

    def close_stream(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended."""
        for request_id in request_ids:
            self._streams.pop(request_id, None)

    def abort_soon(self, request_ids: list[str], reason: str, as_stop: bool = False) -> None:
        """Have requests ended without waiting for it: works from a handler that is being cancelled."""
        if request_ids:
            select = RequestFilter(ids=request_ids)
            self.send_soon(AbortRequests(select=select, reason=reason, as_stop=as_stop))

    def send_soon(self, command: AnyCommand, on_behalf_of: str = "") -> None:
        """Have a command sent whose reply nobody needs; without an engine it is dropped."""
        task = asyncio.create_task(self._send(command, on_behalf_of))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, command: AnyCommand, on_behalf_of: str) -> None:
        with contextlib.suppress(Disconnected, CommandRefused, NoReply):
            await self.request(command, on_behalf_of=on_behalf_of)
