"""The control server: an asyncio thread beside the engine's, which alone talks to sockets.

It polls the engine's outbox while steps run, parks itself when the engine is idle, and never makes the engine wait:
snapshots are asked for at the pace at which each watcher reads. What commands do is in `commands.py` and
`operations.py`, one client's affairs are in `connection.py`.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

from schedtop.control.audit import AuditLog
from schedtop.control.commands import Commands
from schedtop.control.connection import Connection
from schedtop.control.errors import NotAllowed, ShuttingDown
from schedtop.control.messages import (
    PROTOCOL_VERSION,
    Ack,
    AddRequest,
    AnyCommand,
    Drain,
    EngineInfo,
    Envelope,
    ErrorReply,
    GetInfo,
    GetSnapshot,
    GetStepModel,
    Pause,
    RequestFilter,
    Resume,
    Subscribe,
    TokenOutput,
    Welcome,
)
from schedtop.control.open_files import ConnectionLimit, connection_limit
from schedtop.control.operations import add_request, check_priority
from schedtop.control.owners import Owners
from schedtop.control.unix_socket import BACKLOG, ListeningSocket, open_socket
from schedtop.control.watchers import Engine, Watchers
from schedtop.engine.core import EngineCore
from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import KnobSpec
from schedtop.engine.loop import Call
from schedtop.engine.outputs import EngineCoreOutputs, RequestOutput

logger = logging.getLogger(__name__)

POLL_S = 0.0009
"""Between looks at the outbox while steps run, where tokens leave through it."""
MAX_CONNECTIONS = 1024
"""Clients connected at a time, as far as the system allows so many open files."""
FLUSH_S = 1.0
"""How long closing connections may take to deliver their last messages."""
CAPABILITIES = sorted(kind.__name__ for kind in get_args(AnyCommand))

T = TypeVar("T")


class ControlServer:
    """Serves one engine on one socket. `start` and `stop` are for any thread; everything else is the control thread's.

    `capabilities`: names of the commands this engine can carry out (all by default); others are refused.
    `poll_s`: between looks at the outbox while steps run.
    """

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        knob_table: tuple[KnobSpec, ...],
        audit: AuditLog,
        capabilities: list[str] | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        self.ended = threading.Event()
        """Set when the server is down: after `stop`, or because the engine died."""
        self._engine = engine
        self._info = info
        self._knob_table = knob_table
        self._audit = audit
        self._capabilities = CAPABILITIES if capabilities is None else capabilities
        self._poll_s = poll_s
        self._connections: set[Connection] = set()
        self._with_tokens: set[Connection] = set()
        """Those for which tokens wait: a poll costs nothing for the others."""
        self._owners = Owners()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_shutting_down = False
        self._is_stopping = False
        self._limit: ConnectionLimit
        self._hurry: asyncio.Event
        self._all_gone: asyncio.Event
        self._bell: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._commands: Commands
        self._watchers: Watchers
        self._socket: ListeningSocket
        self._thread: threading.Thread

    # ---- life, from any thread ------------------------------------------------------------------------------

    def start(self, path: Path) -> None:
        """Bind `path` and serve in a thread of its own. Raises `SocketRefused`."""
        self._limit = connection_limit(MAX_CONNECTIONS)
        self._socket = open_socket(path)
        is_up = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(is_up,), name="control", daemon=True)
        self._thread.start()
        is_up.wait()
        if self.ended.is_set():
            raise RuntimeError("the control server failed to start; its log tells why")

    def stop(self, limit_s: float = 0.0, reason: str = "the engine is shutting down") -> None:
        """Take no new requests, let those under way finish for `limit_s`, abort the rest, say goodbye; idempotent."""
        self.begin_stop(limit_s, reason)
        self._thread.join()

    def begin_stop(self, limit_s: float, reason: str = "the engine is shutting down") -> None:
        """As `stop`, without waiting; called again, it waits for nobody any more."""
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._begin_shutdown, limit_s, reason)

    def _run(self, is_up: threading.Event) -> None:
        try:
            asyncio.run(self._serve(is_up))
        finally:
            self._socket.close()
            self.ended.set()
            is_up.set()

    async def _serve(self, is_up: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._bell, self._hurry, self._all_gone = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._commands = Commands(self.call, self._audit, self._info.boot_id, self._next_step)
        self._watchers = Watchers(self._engine, self._commands.book)
        self._engine.wake_watcher = self._wake_from_engine
        listening = await self._loop.create_unix_server(
            partial(Connection, self), sock=self._socket.listener, backlog=BACKLOG
        )
        is_up.set()
        try:
            await self._pump()
        finally:
            listening.close()
            self._commands.cancel_timers()
            await self._let_go()

    def _next_step(self) -> int:
        return self._watchers.step + 1

    def _wake_from_engine(self) -> None:
        with contextlib.suppress(RuntimeError):  # the control thread's loop is closed: nobody to wake
            self._loop.call_soon_threadsafe(self._bell.set)

    async def _let_go(self) -> None:
        """Give what was sent a moment to leave, then drop everybody."""
        if self._connections:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_gone.wait(), FLUSH_S)
        for task in self._tasks:
            task.cancel()

    # ---- the pump -------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        """Carry what the engine leaves in its outbox to whom it concerns, until the end."""
        while not self._is_stopping:
            is_alive = self._engine.is_alive
            self._empty_outbox()
            if not is_alive:
                self._engine_died()
                return
            now = time.monotonic()
            self._send_tokens()
            self._watchers.deliver(now)
            if self._engine.is_idle and not self._engine.outbox:
                await self._park(now)
            else:
                await asyncio.sleep(self._poll_s)

    def _send_tokens(self) -> None:
        for connection in list(self._with_tokens):
            connection.send_tokens()
            if not connection.tokens:
                self._with_tokens.discard(connection)

    async def _park(self, now: float) -> None:
        """Sleep until the engine has something, a client wants something, or a snapshot is due."""
        self._bell.clear()
        self._engine.watcher_parked = True
        if self._engine.outbox or not self._engine.is_alive:
            self._engine.watcher_parked = False
            return
        due = self._watchers.next_due()
        try:
            async with asyncio.timeout(None if due is None else max(0.0, due - now)):
                await self._bell.wait()
        except TimeoutError:
            pass
        finally:
            self._engine.watcher_parked = False

    def _empty_outbox(self) -> None:
        outbox = self._engine.outbox
        while outbox:
            item = outbox.popleft()
            if isinstance(item, Call):
                assert item.step is not None
                item.tag(item)
            else:
                self._take_outputs(item)

    def _take_outputs(self, outputs: EngineCoreOutputs) -> None:
        self._watchers.note(outputs)
        by_owner: defaultdict[Connection, list[TokenOutput]] = defaultdict(list)
        for output in outputs.outputs:
            if (owner := self._owners.get(output.request_id)) is not None:
                by_owner[owner].append(_token_output(output))
                if output.finish_reason is not None:
                    self._owners.forget(output.request_id)
        for owner, tokens in by_owner.items():
            owner.add_tokens(outputs.step, tokens)
            self._with_tokens.add(owner)

    # ---- connections (`connection.Host`) --------------------------------------------------------------------

    def welcome(self, read_only: bool) -> Welcome:
        """The answer to a greeting."""
        return Welcome(
            protocol=PROTOCOL_VERSION,
            info=self._info,
            knobs=list(self._knob_table),
            capabilities=self._capabilities,
            read_only=read_only,
        )

    @property
    def step(self) -> int:
        """The newest step heard of."""
        return self._watchers.step

    def connected(self, connection: Connection) -> None:
        """A connection is there: it sees what happens from now on."""
        self._connections.add(connection)
        self._all_gone.clear()
        self._watchers.place_at_end(connection)
        if self._is_stopping:
            connection.close("the engine is shutting down")
        elif len(self._connections) > self._limit.room:
            connection.refusal = NotAllowed(f"{self._limit.text}; close one and try again")

    def ready(self) -> None:
        """A connection can be written to again."""
        self._watchers.look_again()
        self._bell.set()

    def disconnected(self, connection: Connection) -> None:
        """A connection is gone, and with it the requests it submitted."""
        self._connections.discard(connection)
        self._with_tokens.discard(connection)
        self._watchers.forget(connection)
        if not self._connections:
            self._all_gone.set()
        request_ids = sorted(connection.request_ids)
        for request_id in request_ids:
            self._owners.forget(request_id)
        if request_ids:
            self._engine.submit(lambda core: core.abort(request_ids, "its client disconnected"), lambda call: None)

    def take(self, connection: Connection, envelope: Envelope, why_not: SchedtopError | None = None) -> None:
        """A command has come: answer it now or start a task that will; `why_not`: it mustn't be carried out."""
        command = envelope.command
        try:
            if why_not is not None:
                raise why_not
            self._check_capable(command)
            match command:
                case AddRequest():
                    self._submit(connection, envelope, command)
                case Subscribe():
                    self._watchers.subscribe(connection, envelope.id, command)
                case GetSnapshot():
                    self._watchers.reply_with_snapshot(connection, envelope.id, command.viewport)
                case GetStepModel():
                    fitted = {"fitted": self._watchers.step_model()}
                    connection.reply(Ack(id=envelope.id, applied_at_step=self._next_step(), data=fitted))
                case GetInfo():
                    connection.reply(Ack(id=envelope.id, applied_at_step=self._next_step(), data=self._identity()))
                case Pause() | Resume() | Drain() if self._is_shutting_down:
                    raise ShuttingDown("the engine is shutting down: what runs may end, and that can't be turned back")
                case _:
                    self._spell_out(command)
                    self._start(connection, envelope)
        except SchedtopError as error:
            self._start(connection, envelope, error)
        self._bell.set()

    def _identity(self) -> dict[str, Any]:
        return {
            "info": self._info,
            "knobs": self._knob_table,
            "capabilities": self._capabilities,
            "clients": Counter(connection.session.client for connection in self._connections),
            "audit": {"path": str(self._audit.path.absolute()), "failure": self._audit.failure},
        }

    def _check_capable(self, command: AnyCommand) -> None:
        if (name := type(command).__name__) not in self._capabilities:
            if isinstance(command, AddRequest):
                raise NotAllowed(
                    "this engine takes requests (AddRequest) through its own front end only, at the address of "
                    "`vllm serve`: send them there; here it can be watched and steered"
                )
            raise NotAllowed(f"this engine can't carry out {name}; it can {', '.join(self._capabilities)}")

    def _spell_out(self, command: AnyCommand) -> None:
        select: RequestFilter | None = getattr(command, "select", None)
        if select is None:
            return
        if select.submitted_by is not None and AddRequest.__name__ not in self._capabilities:
            raise NotAllowed("this engine's requests don't come through this socket: who submitted them isn't known")
        command.select = self._owners.spelt_out(select)  # type: ignore[union-attr]

    # ---- requests -------------------------------------------------------------------------------------------

    def _submit(self, connection: Connection, envelope: Envelope, command: AddRequest) -> None:
        if self._is_shutting_down:
            raise ShuttingDown("the engine is shutting down and takes no new requests")
        check_priority(command.priority)
        received = time.monotonic()
        self._engine.submit(
            lambda core: add_request(core, command, received), partial(self._submitted, connection, envelope, command)
        )

    def _submitted(self, connection: Connection, envelope: Envelope, command: AddRequest, call: Call) -> None:
        if call.error is not None:
            connection.refuse(envelope.id, call.error)
            return
        if connection not in self._connections:
            self._engine.submit(
                lambda core: core.abort([command.request_id], "its client disconnected"), lambda call: None
            )
            return
        submitter = envelope.on_behalf_of or connection.session.client
        self._owners.add(command.request_id, connection, submitter, command.parent)
        connection.reply(Ack(id=envelope.id, applied_at_step=_step_of(call), did=call.result.did))

    # ---- commands -------------------------------------------------------------------------------------------

    def _start(self, connection: Connection, envelope: Envelope, why_not: SchedtopError | None = None) -> None:
        task = asyncio.create_task(self._carry_out(connection, envelope, why_not))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, connection: Connection, envelope: Envelope, why_not: SchedtopError | None) -> None:
        command = envelope.command
        try:
            is_own = connection.only_withdraws(envelope)
            actor = connection.actor(envelope.on_behalf_of)
            connection.reply(await self._commands.carry_out(envelope.id, command, actor, is_own, why_not))
        except SchedtopError as error:
            connection.refuse(envelope.id, error)
        except Exception as error:
            logger.exception("%s failed", type(command).__name__)
            message = f"{type(command).__name__} failed by a fault of the server ({error!r}); its log tells more"
            connection.reply(ErrorReply(id=envelope.id, code="internal", message=message))

    async def call(self, operation: Callable[[EngineCore], T]) -> tuple[T, int]:
        """Run something at the next step boundary: its result and the first step that sees the effect."""
        done: asyncio.Future[Call] = self._loop.create_future()
        self._engine.submit(operation, partial(_resolve, done))
        self._bell.set()
        call = await done
        if call.error is not None:
            raise call.error
        return call.result, _step_of(call)

    # ---- the end --------------------------------------------------------------------------------------------

    def _engine_died(self) -> None:
        failure = self._engine.failure
        reason = f"the engine died: {type(failure).__name__}: {failure}" if failure else "the engine ended"
        if isinstance(failure, SchedtopError):
            reason = str(failure)
        logger.error("%s", reason)
        for connection in list(self._connections):
            connection.close(reason)

    def _begin_shutdown(self, limit_s: float, reason: str) -> None:
        if self._is_shutting_down:
            self._hurry.set()
            return
        self._is_shutting_down = True
        self._watchers.announce_shutdown()
        task = asyncio.create_task(self._shut_down(limit_s, reason))
        self._tasks.add(task)

    async def _shut_down(self, limit_s: float, reason: str) -> None:
        """Drain as far as the limit goes, end the rest with a final message, say goodbye to all."""
        try:
            await self._drain(limit_s)
            await self.call(lambda core: core.abort(core.match(id_prefix=""), reason))
        except SchedtopError:
            logger.exception("the drain before the end failed")
        await self._flush_tokens()
        for connection in list(self._connections):
            connection.close(reason)
        self._is_stopping = True
        self._bell.set()

    async def _drain(self, limit_s: float) -> None:
        if limit_s <= 0:
            return
        (num_left, _) = await self.call(lambda core: core.start_drain())
        hurry = asyncio.create_task(self._hurry.wait())
        drained = asyncio.create_task(self._commands.wait_drained(num_left, limit_s))
        await asyncio.wait((hurry, drained), return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        drained.cancel()

    async def _flush_tokens(self) -> None:
        deadline = time.monotonic() + FLUSH_S
        while self._with_tokens and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
            self._send_tokens()


def _token_output(output: RequestOutput) -> TokenOutput:
    return TokenOutput(
        request_id=output.request_id,
        token_ids=output.new_token_ids,
        finish_reason=output.finish_reason,
        detail=output.detail,
        logprobs=output.logprobs,
        num_cached_tokens=output.num_cached_tokens,
        prompt_logprobs=output.prompt_logprobs,
    )


def _resolve(done: "asyncio.Future[Call]", call: Call) -> None:
    if not done.done():
        done.set_result(call)


def _step_of(call: Call) -> int:
    assert call.step is not None
    return call.step
