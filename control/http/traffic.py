"""Counts HTTP requests by route, method and status class, under the names vLLM's server uses.

Labels come from our own route table: a path or method nobody serves counts as `none`.
"""

import time

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CollectorRegistry, Counter, Histogram

DURATION_BOUNDS = (0.1, 0.5, 1.0)
NO_ROUTE = "none"


class Traffic:
    """The counters, and the middleware that feeds them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "http_requests", "Total number of requests by method, status and handler.",
            ("handler", "method", "status"), registry=registry,
        )  # fmt: skip
        self._duration = Histogram(
            "http_request_duration_seconds", "Time until the response was complete, by handler.",
            ("handler", "method"), buckets=DURATION_BOUNDS, registry=registry,
        )  # fmt: skip

    @property
    def middleware(self) -> Middleware:
        """Outermost: it sees every response."""

        @web.middleware
        async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
            start = time.monotonic()
            response = await handler(request)
            route, method = _labels(request)
            self._requests.labels(route, method, f"{response.status // 100}xx").inc()
            self._duration.labels(route, method).observe(time.monotonic() - start)
            return response

        return count


def _labels(request: web.Request) -> tuple[str, str]:
    resource = request.match_info.route.resource
    if resource is None or request.match_info.http_exception is not None:
        return NO_ROUTE, NO_ROUTE
    return resource.canonical, request.method
