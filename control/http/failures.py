"""Errors as HTTP shows them, in OpenAI's shape. Which fault gets which status is decided here and nowhere else."""

from typing import Any

import msgspec
from aiohttp import web

from schedtop.control.errors import CommandRefused, Disconnected
from schedtop.control.http.as_json import json_response

STATUS_OF_CODE = {
    "refused": 400,
    "prompt_too_long": 400,
    "knob_refused": 400,
    "bad_frame": 400,
    "bad_command": 400,
    "not_allowed": 403,
    "conflict": 409,
    "id_in_use": 409,
    "frame_too_long": 413,
    "queue_full": 429,
    "shutting_down": 503,
    "no_reply": 504,
}
_TYPE_OF_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "server_error",
    501: "server_error",
    503: "service_unavailable_error",
    504: "service_unavailable_error",
}
_AS_OPENAI = {"prompt_too_long": ("context_length_exceeded", "prompt")}
"""The engine's code -> the code that OpenAI's clients know, and the field at fault."""
DEFAULT_RETRY_AFTER_S = 1


class ApiError(Exception):
    """A request that ends with an error. `param` names the field at fault, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The error object that OpenAI's clients read."""
        kind = _TYPE_OF_STATUS.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> web.Response:
        """The whole answer, with the headers that belong to the status."""
        response = json_response(self.body(), self.status)
        if self.status == 401:
            response.headers["WWW-Authenticate"] = "Bearer"
        if self.retry_after_s is not None:
            response.headers["Retry-After"] = str(self.retry_after_s)
        return response


def unforeseen() -> ApiError:
    """For a fault of ours: nothing of it is told, the log has it."""
    return ApiError(500, "the gateway failed at this request; its log says how", code="internal")


def from_refusal(refused: CommandRefused, retry_after_s: int = DEFAULT_RETRY_AFTER_S) -> ApiError:
    """The engine said no: its own words, under the status that fits its code."""
    status = STATUS_OF_CODE.get(refused.code, 400)
    retry = retry_after_s if status in (429, 503) else None
    code, param = _AS_OPENAI.get(refused.code, (refused.code, None))
    return ApiError(status, refused.message, code=code, param=param, retry_after_s=retry)


def from_disconnect(gone: Disconnected) -> ApiError:
    """The engine went away."""
    return ApiError(503, str(gone), code="engine_away", retry_after_s=DEFAULT_RETRY_AFTER_S)


def from_bad_json(error: msgspec.DecodeError) -> ApiError:
    """A body that isn't what was asked for; `param` is taken from the path in msgspec's message."""
    words, _, path = str(error).partition(" - at `$")
    param = path.rstrip("`").lstrip(".").replace("[...]", "") or None
    if words == "Number out of range":
        words = "a number is too large for a JSON number here: they end at 1.8e308"
    return ApiError(400, f"{param}: {words}" if param else words, code="bad_request", param=param)
