"""`/control/v1/*`: everything the control socket can do, one route per command, made from the message types."""

from collections.abc import Iterator

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from schedtop.control.http.auth import Caller, Scope
from schedtop.control.http.keys import CALLER
from schedtop.control.http.service import Service
from schedtop.control.messages import AnyCommand, KnobsAck, SetKnobs

RouteSpec = tuple[str, str, Scope, Handler]
PREFIX = "/control/v1"
_encoder = msgspec.json.Encoder()


def json_response(value: object) -> web.Response:
    """Any message as JSON."""
    return web.Response(body=_encoder.encode(value), content_type="application/json")


class ControlRoutes:
    """Handlers of the control routes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> Iterator[RouteSpec]:
        """Every control path."""
        yield "GET", f"{PREFIX}/knobs", Scope.READ, self.knobs
        yield "PATCH", f"{PREFIX}/knobs", Scope.CONTROL, self.set_knobs

    async def knobs(self, request: web.Request) -> web.Response:
        """The knob table with the values of this moment."""
        await self._service.link.refresh(1.0)
        latest = self._service.link.latest
        return json_response({
            "generation": latest.snapshot.generation if latest else None,
            "values": latest.snapshot.knobs if latest else None,
            "table": self._service.link.welcome.knobs,
        })  # fmt: skip

    async def set_knobs(self, request: web.Request) -> web.Response:
        """Change knobs: the fields of `SetKnobs`."""
        reply = await self._send(request, msgspec.json.decode(await request.read(), type=SetKnobs))
        assert isinstance(reply, KnobsAck)
        return json_response(reply)

    async def _send(self, request: web.Request, command: AnyCommand) -> object:
        caller: Caller = request[CALLER]
        return await self._service.link.request(command, on_behalf_of=caller.name)
