"""Middlewares around every route: what a request must look like, who sent it, and how faults become answers."""

import logging

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from schedtop.control.errors import CommandRefused, Disconnected, NoReply
from schedtop.control.http import auth
from schedtop.control.http.body import too_large
from schedtop.control.http.failures import ApiError, from_bad_json, from_disconnect, from_refusal, unforeseen
from schedtop.control.http.keys import CALLER
from schedtop.control.http.link import SlowReader
from schedtop.control.http.service import Service

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
"""Status under which an answer counts that nobody was there to read."""


class Guard:
    """Checks path, Host, Origin, token and content type, in this order, before a handler sees the request."""

    def __init__(self, hosts: auth.HostRules, tokens: auth.TokenBook, scopes: dict[Handler, auth.Scope]) -> None:
        self._hosts = hosts
        self._tokens = tokens
        self._scopes = scopes

    @property
    def middleware(self) -> Middleware:
        """As aiohttp wants it."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            self._check(request)
            return await handler(request)

        return guard

    def _check(self, request: web.Request) -> None:
        auth.check_path(request.raw_path)
        headers = request.headers
        self._hosts.check(headers.get("Host"), headers.get("Origin"), headers.get("Sec-Fetch-Site"))
        for name in ("Authorization", "Origin"):
            if len(headers.getall(name, ())) > 1:
                raise ApiError(400, f"the header {name} is given more than once", code="bad_request")
        caller = self._tokens.caller(headers.get("Authorization"))
        if request.match_info.http_exception is not None:
            raise request.match_info.http_exception
        request[CALLER] = caller
        auth.require(caller, self._scopes[request.match_info.handler])
        _check_body(request)


def _check_body(request: web.Request) -> None:
    """What the headers say of the body, before any of it is read."""
    if not request.can_read_body:
        return
    if request.content_type != "application/json":
        raise ApiError(415, "bodies are JSON: send `Content-Type: application/json`", code="not_json")
    if (encoding := request.headers.get("Content-Encoding", "identity")) != "identity":
        raise ApiError(415, f"Content-Encoding {encoding!r} isn't taken: send the body as it is", code="compressed")
    if (request.content_length or 0) > request.client_max_size:
        raise too_large(request.content_length or 0, request.client_max_size)


def faults_become_answers(service: Service) -> Middleware:
    """Every error as JSON in OpenAI's shape; what nobody foresaw is logged and told without details.

    What a token's holder was forbidden goes into the audit log.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except (ConnectionError, SlowReader) as gone:
            return _hang_up(request, gone)
        except Exception as error:
            caller = request.get(CALLER)
            if isinstance(error, ApiError) and error.status == 403 and caller is not None:
                service.note_refusal(caller.name, f"{request.method} {request.path}", error.message)
            return _answer(error, service.retry_after_s())

    return middleware


def _hang_up(request: web.Request, why: Exception) -> web.Response:
    """Nobody reads any more: nothing of this is an error of ours, and nothing can be told."""
    level = logging.INFO if isinstance(why, SlowReader) else logging.DEBUG
    logger.log(level, "%s %s is cut: %s", request.method, request.path, why)
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=CLIENT_GONE)


def _answer(error: Exception, retry_after_s: int) -> web.StreamResponse:
    match error:
        case ApiError():
            return error.response()
        case CommandRefused():
            return from_refusal(error, retry_after_s).response()
        case Disconnected():
            return from_disconnect(error).response()
        case NoReply():
            return ApiError(504, str(error), code=error.code).response()
        case msgspec.DecodeError():
            return from_bad_json(error).response()
        case RecursionError():
            return ApiError(400, "the request is nested too deeply to be read", code="bad_request").response()
        case OverflowError():
            return ApiError(400, "a number in the request doesn't fit 64 bits", code="bad_request").response()
        case web.HTTPException():
            response = ApiError(error.status, error.reason, code=f"http_{error.status}").response()
            response.headers.update({name: error.headers[name] for name in ("Allow",) if name in error.headers})
            return response
        case _:
            logger.error("a handler failed", exc_info=error)
            return unforeseen().response()
