"""The gateway put together: which path leads to which handler, who may use it, and how the server starts and ends."""

import asyncio
import contextlib
import errno
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from schedtop.control.http import auth
from schedtop.control.http.as_json import json_response
from schedtop.control.http.auth import Scope
from schedtop.control.http.control import ControlRoutes
from schedtop.control.http.guard import Guard, faults_become_answers
from schedtop.control.http.link import EngineLink
from schedtop.control.http.metrics import Metrics
from schedtop.control.http.openai import OpenAiRoutes
from schedtop.control.http.openapi import document
from schedtop.control.http.playbooks import PlaybookRoutes
from schedtop.control.http.routes import PREFIX
from schedtop.control.http.service import DEFAULT_STALL_LIMIT_S, LoadTokenizer, Service
from schedtop.control.http.tokens import TokenRoutes
from schedtop.control.http.websocket import WebSocketRelay
from schedtop.engine.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 16 << 20
"""Largest body: a prompt of about four million tokens' text."""


GOODBYE_LIMIT_S = 2.0
"""How long handlers may take to say goodbye once their requests were cut."""
CLOSE_LIMIT_S = 0.5
"""How long what is no live request (a body that hasn't come, a client that doesn't read) may hold up the end."""
IDLE_LIMIT_S = 75.0
"""Connections on which no request has begun for so long, or whose headers don't come, are closed."""


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a gateway is started."""

    target: str
    """The control socket."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 = any free one."""
    allowed_hosts: Sequence[str] = ()
    """Further names under which clients may address the gateway."""
    tokens: Sequence[auth.TokenSpec] = ()
    """The local token first, then those of the token file and the environment."""
    is_open: bool = False
    """Inference and reading without a token: on loopback only, and only if no tokens were set up."""
    drain_limit_s: float = 10.0
    """How long live requests may go on at shutdown."""
    stall_limit_s: float = DEFAULT_STALL_LIMIT_S
    playbooks: Path | None = None
    """A folder of playbooks that clients may start by name, besides the shipped ones."""


class Route(NamedTuple):
    """One path."""

    method: str
    path: str
    scope: Scope
    handler: Handler


class Gateway:
    """One gateway: `start()`, then `shutdown()`. `url` says where it listens."""

    def __init__(self, config: GatewayConfig, load_tokenizer: LoadTokenizer) -> None:
        self.config = config
        self.link = EngineLink(config.target)
        self.service = Service(self.link, load_tokenizer, config.stall_limit_s)
        self.metrics = Metrics(self.service)
        self.control = ControlRoutes(self.service)
        self.playbooks = PlaybookRoutes(config.target, self.metrics.registry, config.playbooks)
        self.relay = WebSocketRelay(self.service, self.metrics.samples.count_websockets)
        self._runner: web.AppRunner | None = None
        self._port = config.port

    @property
    def url(self) -> str:
        """Where clients find it."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http://{host}:{self._port}"

    def routes(self) -> list[Route]:
        """Every path there is, with the scope it needs."""
        openai, tokens = OpenAiRoutes(self.service), TokenRoutes(self.service)
        return [
            Route("GET", "/health", Scope.OPEN, self.health),
            Route("GET", "/ready", Scope.OPEN, self.ready),
            Route("GET", "/openapi.json", Scope.METRICS, self.openapi),
            Route("GET", "/metrics", Scope.METRICS, self.metrics.page),
            Route("GET", "/v1/models", Scope.INFER, openai.models),
            Route("GET", "/v1/models/{model}", Scope.INFER, openai.model),
            Route("POST", "/v1/completions", Scope.INFER, openai.completions),
            Route("POST", "/v1/chat/completions", Scope.INFER, openai.chat_completions),
            Route("POST", "/tokenize", Scope.INFER, tokens.tokenize),
            Route("POST", "/detokenize", Scope.INFER, tokens.detokenize),
            *(Route(*route) for route in self.control.routes()),
            *(Route(*route) for route in self.playbooks.routes()),
            Route("GET", f"{PREFIX}/ws", Scope.READ, self.relay.handle),
        ]

    def app(self) -> web.Application:
        """The aiohttp application."""
        routes = self.routes()
        guard = Guard(
            auth.HostRules(self.config.host, self.config.allowed_hosts),
            auth.TokenBook(self.config.tokens, auth.ANYBODY if self.config.is_open else auth.NOBODY),
            {route.handler: route.scope for route in routes},
        )
        app = web.Application(
            client_max_size=MAX_BODY_BYTES,
            middlewares=[self.metrics.traffic.middleware, faults_become_answers(self.service), guard.middleware],
        )
        for route in routes:
            app.router.add_route(route.method, route.path, route.handler)
        return app

    async def health(self, request: web.Request) -> web.Response:
        """Live: the engine answers, and steps end while work is pending."""
        return _status(await self.service.fault())

    async def ready(self, request: web.Request) -> web.Response:
        """Ready: healthy, not paused, not leaving."""
        return _status(await self.service.why_not_ready())

    async def openapi(self, request: web.Request) -> web.Response:
        """This interface, described for programs."""
        open_to_all = auth.ANYBODY.scopes if self.config.is_open else ()
        return json_response(document(self.routes(), self.link.welcome.knobs, open_to_all))

    async def start(self) -> None:
        """Listen and connect to the engine. Raises `ConfigError` for an address that can't be listened on."""
        self.link.start()
        # handler_cancellation: a client that goes away ends its handler at once, whose `finally` aborts the request.
        self._runner = web.AppRunner(
            self.app(), handler_cancellation=True, access_log=None, shutdown_timeout=CLOSE_LIMIT_S,
            keepalive_timeout=IDLE_LIMIT_S, auto_decompress=False, logger=_protocol_logger(),
        )  # fmt: skip
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self.config.host, self.config.port).start()
        except OSError as error:
            await self.link.close()
            await self._runner.cleanup()
            raise ConfigError(_why_deaf(error, self.config.host, self.config.port)) from None
        self._port = self._runner.addresses[0][1]
        logger.info("listening on %s", self.url)

    async def shutdown(self) -> None:
        """Not ready first, then let live requests end, then tell those that are left, then close everything."""
        self.service.is_leaving = True
        await self.playbooks.close()
        if not await self.service.drained(self.config.drain_limit_s):
            logger.warning("requests are still running after %g s: they are cut", self.config.drain_limit_s)
        self.control.events.end()
        await self.link.close()
        await asyncio.gather(self.relay.close(), self.service.drained(GOODBYE_LIMIT_S))
        if self._runner is not None:
            await self._runner.cleanup()

    def cut(self) -> None:
        """Don't wait any longer for live requests; a second signal calls this."""
        self.service.stop_waiting()


@contextlib.asynccontextmanager
async def running(gateway: Gateway) -> AsyncIterator[Gateway]:
    """A started gateway that is shut down at the end."""
    await gateway.start()
    try:
        yield gateway
    finally:
        await asyncio.shield(gateway.shutdown())


def _protocol_logger() -> logging.Logger:
    """aiohttp's own log, without a traceback for each client that doesn't speak HTTP: it is told so, that's enough."""
    log = logging.getLogger(f"{__name__}.protocol")
    if not log.filters:
        log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))
    return log


def _why_deaf(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken; give --port"
    return f"can't listen on port {port} of {host} ({error.strerror or error}); give another --host or --port"


def _status(fault: str | None) -> web.Response:
    if fault is None:
        return json_response({"status": "ok"})
    return json_response({"status": "unavailable", "reason": fault}, status=503)
