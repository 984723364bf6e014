"""The response to one generating request, whole or streamed: from deltas to bytes, and what happens when it fails."""

import logging

from aiohttp import web

from schedtop.control.errors import Disconnected
from schedtop.control.http import sse
from schedtop.control.http.as_json import json_response
from schedtop.control.http.failures import ApiError, from_disconnect, unforeseen
from schedtop.control.http.generation import Delta, Generation
from schedtop.control.http.link import SlowReader
from schedtop.control.http.openai_types import StreamOptions
from schedtop.control.http.render import Renderer, usage_of

logger = logging.getLogger(__name__)


class Response:
    """One request's response. `echoes`: the prompts' texts, where they are to stand before the answers."""

    def __init__(self, generation: Generation, renderer: Renderer, echoes: list[str] | None = None) -> None:
        self._generation = generation
        self._renderer = renderer
        self._begun = [Delta(answer.index) for answer in generation.answers]
        """What each choice begins with, whatever is generated."""
        for delta in self._begun if echoes else ():
            assert echoes is not None
            delta.text = echoes[delta.index // generation.plan.n]

    async def whole(self) -> web.Response:
        """All choices at once, when the last one has ended."""
        async for deltas in self._generation.deltas():
            for delta in deltas:
                _append(self._begun[delta.index], delta)
        return json_response(self._renderer.whole(self._begun, usage_of(self._generation)))

    async def streamed(self, request: web.Request, options: StreamOptions) -> web.StreamResponse:
        """Events as text comes. The engine has accepted: what fails from here on is told inside the stream."""
        stream = await sse.EventStream.open(request)
        try:
            await self._send_deltas(stream, options)
        except (ApiError, Disconnected) as error:
            failure = from_disconnect(error) if isinstance(error, Disconnected) else error
            await stream.send(sse.event(failure.body()))
        except (ConnectionError, SlowReader):
            raise
        except Exception as error:
            logger.error("a stream failed", exc_info=error)
            await stream.send(sse.event(unforeseen().body()))
        await stream.send(sse.DONE)
        return await stream.end()

    async def _send_deltas(self, stream: sse.EventStream, options: StreamOptions) -> None:
        """Every step's tokens at once, also those that show no text yet: clients take chunks for tokens.

        For the same reason what comes before the first token is sent with it.
        """
        openings = [sse.event(opening) for opening in self._renderer.openings(len(self._begun))]
        async for deltas in self._generation.deltas():
            chunks = [self._chunk(delta, options) for delta in self._joined(deltas)]
            await stream.send(b"".join([*openings, *chunks]))
            openings = []
        if options.include_usage:
            await stream.send(sse.event(self._renderer.usage_chunk(usage_of(self._generation))))

    def _joined(self, deltas: list[Delta]) -> list[Delta]:
        """One delta for each choice: of a client that reads slowly several may have come."""
        joined: dict[int, Delta] = {}
        for delta in deltas:
            if delta.index not in joined:
                joined[delta.index], self._begun[delta.index] = self._begun[delta.index], Delta(delta.index)
            _append(joined[delta.index], delta)
        return list(joined.values())

    def _chunk(self, delta: Delta, options: StreamOptions) -> bytes:
        usage = usage_of(self._generation) if options.continuous_usage_stats else None
        return sse.event(self._renderer.chunk(delta, usage))


def _append(whole: Delta, delta: Delta) -> None:
    whole.text += delta.text
    whole.tokens += delta.tokens
    whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
