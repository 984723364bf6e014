"""`/control/v1/*`: everything the control socket can do. Commands come from the table in `routes.py`."""

from collections.abc import Iterator
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from schedtop.control.http import sse
from schedtop.control.http.as_json import json_response
from schedtop.control.http.auth import Caller, Scope, check_command
from schedtop.control.http.body import body_of
from schedtop.control.http.events import EventHub
from schedtop.control.http.failures import ApiError, from_bad_json
from schedtop.control.http.keys import CALLER
from schedtop.control.http.link import COMMAND_TIMEOUT_S
from schedtop.control.http.routes import COMMAND_ROUTES, PREFIX, CommandRoute
from schedtop.control.http.service import Service
from schedtop.control.messages import AnyCommand, GetSnapshot, SnapshotReply
from schedtop.engine.snapshot import NO_ROWS, Viewport

RouteSpec = tuple[str, str, Scope, Handler]
MAX_EVENT_STREAMS = 64
"""Clients that may follow the event stream at once."""


class ControlRoutes:
    """Handlers of the control routes."""

    def __init__(self, service: Service) -> None:
        self.events = EventHub(service.link)
        self._service = service

    def routes(self) -> Iterator[RouteSpec]:
        """Every control path but the WebSocket's."""
        yield "GET", f"{PREFIX}/knobs", Scope.READ, self.knobs
        yield "GET", f"{PREFIX}/requests", Scope.READ, self.requests
        yield "GET", f"{PREFIX}/events", Scope.READ, self.follow_events
        for route in COMMAND_ROUTES:
            yield route.method, route.path, route.scope, self._handler(route)

    async def knobs(self, request: web.Request) -> web.Response:
        """The knob table with the values of this moment."""
        snapshot = (await self._snapshot(NO_ROWS)).snapshot
        table = self._service.link.welcome.knobs
        return json_response({"generation": snapshot.generation, "values": snapshot.knobs, "table": table})

    async def requests(self, request: web.Request) -> web.Response:
        """Live requests; the query is a viewport."""
        snapshot = (await self._snapshot(_from_query(request, Viewport))).snapshot
        return json_response({
            "step": snapshot.step,
            "num_running": snapshot.num_running,
            "num_waiting": snapshot.num_waiting,
            "running": snapshot.running,
            "waiting": snapshot.waiting,
            "detail": snapshot.detail,
        })  # fmt: skip

    async def _snapshot(self, viewport: Viewport) -> Any:
        reply = await self._service.link.request(GetSnapshot(viewport=viewport), COMMAND_TIMEOUT_S)
        assert isinstance(reply, SnapshotReply)
        return reply.update

    def _handler(self, route: CommandRoute) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            command = await self._command(route, request)
            caller: Caller = request[CALLER]
            check_command(caller, command)
            timeout_s = None if route.waits else COMMAND_TIMEOUT_S
            reply = await self._service.link.request(command, timeout_s, on_behalf_of=caller.name)
            return json_response(reply.update if isinstance(reply, SnapshotReply) else reply)

        return handle

    async def _command(self, route: CommandRoute, request: web.Request) -> AnyCommand:
        if route.method == "GET":
            if route.fields is Viewport:
                return GetSnapshot(viewport=_from_query(request, Viewport))
            command: AnyCommand = _from_query(request, route.command)
        else:
            command = msgspec.json.decode(await body_of(request) or b"{}", type=route.command)
        return command

    async def follow_events(self, request: web.Request) -> web.StreamResponse:
        """The engine's events as they happen; `Last-Event-ID` resumes, as far as the gateway remembers."""
        if self.events.num_followers >= MAX_EVENT_STREAMS:
            raise ApiError(
                429, f"{MAX_EVENT_STREAMS} clients follow the events already", code="too_many", retry_after_s=10
            )
        last_seen = request.headers.get("Last-Event-ID", "")
        follower = self.events.follow(int(last_seen) if last_seen.isdecimal() and len(last_seen) < 19 else None)
        try:
            stream = await sse.EventStream.open(request)
            await stream.send(b": events follow\n\n")
            while (news := await follower.take()) is not None:
                await stream.send(news)
            return await stream.end()
        finally:
            self.events.unfollow(follower)


def _from_query(request: web.Request, kind: type) -> Any:
    """Query parameters as the fields of a message; each may be given once."""
    fields: dict[str, str] = {}
    for name, value in request.query.items():
        if name in fields:
            raise ApiError(400, f"{name} is given twice", code="bad_request", param=name)
        fields[name] = value
    try:
        return msgspec.convert(fields, kind, strict=False)
    except msgspec.ValidationError as error:
        raise from_bad_json(error) from None
