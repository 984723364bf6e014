"""What all routes share: the engine's connection, the tokenizer of its model, and whether we are up, ready or leaving.

No routes in here.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from schedtop.control.http.failures import ApiError
from schedtop.control.http.generation import Answer, OnAnswered, Plan
from schedtop.control.http.health import StallWatch
from schedtop.control.http.link import EngineLink, tell
from schedtop.control.http.text import Tokenizer
from schedtop.control.messages import EngineInfo, NoteRefusal, SnapshotUpdate, Welcome
from schedtop.engine.daemon_executor import DaemonExecutor
from schedtop.engine.errors import ConfigError
from schedtop.engine.snapshot import PauseState

LoadTokenizer = Callable[[EngineInfo], Tokenizer]
REFRESH_TIMEOUT_S = 1.0
DEFAULT_STALL_LIMIT_S = 60.0
"""Age of the last finished step, with work pending, from which the engine counts as stuck."""
MAX_RETRY_AFTER_S = 60


class Service:
    """The gateway's state. `load_tokenizer` runs once per engine, off the event loop."""

    def __init__(
        self, link: EngineLink, load_tokenizer: LoadTokenizer, stall_limit_s: float = DEFAULT_STALL_LIMIT_S
    ) -> None:
        self.link = link
        self.is_leaving = False
        """Set first at shutdown: not ready, no new requests, live ones go on."""
        self.on_answered: list[OnAnswered] = []
        self.on_refused: list[Callable[[str, str], None]] = []
        """Called with code and message of each request the engine didn't take."""
        self._stall_limit_s = stall_limit_s
        self._stall_watch = StallWatch()
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_of = ""
        self._loading = asyncio.Lock()
        self._loader = DaemonExecutor(1, "tokenizer")
        """Not asyncio's own, which the end of the process would wait for: loading takes long, and may hang."""
        self._num_live = 0
        self._all_ended = asyncio.Event()
        self._all_ended.set()
        self._preloading: asyncio.Task[None] | None = None
        link.on_update.append(self._see)
        link.on_welcome.append(self._preload)

    def _see(self, update: SnapshotUpdate) -> None:
        self._stall_watch.see(update.snapshot, time.monotonic())

    @property
    def info(self) -> EngineInfo:
        """Who the engine is. Raises `Disconnected` if none has been reached yet."""
        return self.link.welcome.info

    async def tokenizer(self) -> Tokenizer:
        """The tokenizer of the engine's model. Raises `Disconnected` without an engine, `ApiError` if it won't load."""
        info = self.info
        async with self._loading:
            if self._tokenizer is None or self._tokenizer_of != info.model_path:
                try:
                    self._tokenizer = await asyncio.get_running_loop().run_in_executor(
                        self._loader, self._load_tokenizer, info
                    )
                except (OSError, ValueError, ImportError, ConfigError) as error:
                    raise ApiError(
                        503, f"the tokenizer of {info.model!r} doesn't load: {error}", code="no_tokenizer"
                    ) from error
                self._tokenizer_of = info.model_path
            return self._tokenizer

    def _preload(self, welcome: Welcome) -> None:
        """Load the tokenizer before the first request needs it."""
        self._preloading = asyncio.create_task(self._load_early())

    async def _load_early(self) -> None:
        with contextlib.suppress(ApiError):  # told to the first request instead
            await self.tokenizer()

    def answered(self, answer: Answer, plan: Plan, siblings: Sequence[Answer]) -> None:
        """An answer has ended: tell whoever counts them."""
        tell(self.on_answered, answer, plan, siblings)

    def refused(self, code: str, message: str) -> None:
        """The engine didn't take a request: tell whoever counts them."""
        tell(self.on_refused, code, message)

    def note_refusal(self, caller: str, action: str, detail: str) -> None:
        """Have it written into the audit log that a token's holder asked for what it may not have."""
        note = NoteRefusal(action=action[:64], detail=detail)
        self.link.send_soon(note, on_behalf_of=caller)

    # ---- coming and going -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Around a request's whole life. Raises `ApiError` 503 when we are leaving."""
        if self.is_leaving:
            raise ApiError(503, "the gateway is shutting down", code="shutting_down", retry_after_s=1)
        self._num_live += 1
        self._all_ended.clear()
        try:
            yield
        finally:
            self._num_live -= 1
            if not self._num_live:
                self._all_ended.set()

    async def drained(self, limit_s: float) -> bool:
        """Wait until no request is left; False if some are after `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                await self._all_ended.wait()
        except TimeoutError:
            return False
        return True

    def stop_waiting(self) -> None:
        """Let `drained` end now."""
        self._all_ended.set()

    def retry_after_s(self) -> int:
        """How long to wait before another attempt: what the requests admitted last spent in the queue."""
        record = self.link.latest.snapshot.last_step if self.link.latest else None
        queued = max(record.queue_time, default=0.0) if record else 0.0
        return min(max(1, round(queued)), MAX_RETRY_AFTER_S)

    # ---- health -----------------------------------------------------------------------------------------------

    async def fault(self) -> str | None:
        """Why the engine can't be called healthy; None if it can."""
        if not self.link.is_connected:
            return "no engine is connected"
        if await self.link.refresh(REFRESH_TIMEOUT_S):
            assert self.link.latest is not None
            self._see(self.link.latest)
        age = self._stall_watch.age_s(time.monotonic())
        if age > self._stall_limit_s:
            return f"work is pending and nothing has moved for {age:.0f} s (limit {self._stall_limit_s:g} s)"
        return None

    async def why_not_ready(self) -> str | None:
        """Why new requests had better go elsewhere; None if they are welcome."""
        if self.is_leaving:
            return "shutting down"
        if (fault := await self.fault()) is not None:
            return fault
        latest = self.link.latest
        if latest is None:
            return "the engine has told nothing yet"
        if self._tokenizer is None:
            return "the tokenizer is loading"
        if latest.shutting_down:
            return "the engine is shutting down"
        if latest.snapshot.pause is not PauseState.RUNNING:
            return f"paused ({latest.snapshot.pause.value})"
        return None
