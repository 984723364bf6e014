"""Counts HTTP requests by route, method and status class, and their sizes, under the names vLLM's server uses.

Labels come from our own route table: a path or method nobody serves counts as `none`.
"""

import time

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CollectorRegistry, Counter, Histogram, Summary

DURATION_BOUNDS = (0.1, 0.5, 1.0)
HIGH_RESOLUTION_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5,
                          5.0, 7.5, 10.0, 30.0, 60.0)  # fmt: skip
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
        self._duration_of_all = Histogram(
            "http_request_duration_highr_seconds", "Time until the response was complete, all handlers together.",
            buckets=HIGH_RESOLUTION_BOUNDS, registry=registry,
        )  # fmt: skip
        self._request_size = Summary(
            "http_request_size_bytes", "Content length of requests, by handler.", ("handler",), registry=registry
        )
        self._response_size = Summary(
            "http_response_size_bytes", "Content length of responses, by handler; 0 for streams.", ("handler",),
            registry=registry,
        )  # fmt: skip

    @property
    def middleware(self) -> Middleware:
        """Outermost: it sees every response."""

        @web.middleware
        async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
            start = time.monotonic()
            response = await handler(request)
            self._take(request, response, time.monotonic() - start)
            return response

        return count

    def _take(self, request: web.Request, response: web.StreamResponse, seconds: float) -> None:
        route, method = _labels(request)
        self._requests.labels(route, method, f"{response.status // 100}xx").inc()
        self._duration.labels(route, method).observe(seconds)
        self._duration_of_all.observe(seconds)
        self._request_size.labels(route).observe(request.content_length or 0)
        self._response_size.labels(route).observe(response.content_length or 0)


def _labels(request: web.Request) -> tuple[str, str]:
    resource = request.match_info.route.resource
    if resource is None or request.match_info.http_exception is not None:
        return NO_ROUTE, NO_ROUTE
    return resource.canonical, request.method
