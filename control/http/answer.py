"""The response to one generating request, whole or streamed: from deltas to bytes, and what happens when it fails."""

from aiohttp import web

from schedtop.control.errors import Disconnected
from schedtop.control.http import sse
from schedtop.control.http.as_json import json_response
from schedtop.control.http.failures import ApiError, from_disconnect
from schedtop.control.http.generation import Delta, Generation
from schedtop.control.http.openai_types import StreamOptions
from schedtop.control.http.render import Renderer, usage_of


class Response:
    """One request's response. `echoes`: the prompts' texts, where they are to stand before the answers."""

    def __init__(self, generation: Generation, renderer: Renderer, echoes: list[str] | None = None) -> None:
        self._generation = generation
        self._renderer = renderer
        self._pending = [Delta(answer.index) for answer in generation.answers]
        """What has come of each choice and not been sent yet."""
        for delta in self._pending if echoes else ():
            assert echoes is not None
            delta.text = echoes[delta.index // generation.plan.n]

    async def whole(self) -> web.Response:
        """All choices at once, when the last one has ended."""
        async for deltas in self._generation.deltas():
            for delta in deltas:
                _append(self._pending[delta.index], delta)
        return json_response(self._renderer.whole(self._pending, usage_of(self._generation)))

    async def streamed(self, request: web.Request, options: StreamOptions) -> web.StreamResponse:
        """Events as text comes. The engine has accepted: what fails from here on is told inside the stream."""
        stream = await sse.EventStream.open(request)
        try:
            for opening in self._renderer.openings(len(self._pending)):
                await stream.send(sse.event(opening))
            await self._send_deltas(stream, options)
        except (ApiError, Disconnected) as error:
            failure = from_disconnect(error) if isinstance(error, Disconnected) else error
            await stream.send(sse.event(failure.body()))
        await stream.send(sse.DONE)
        return await stream.end()

    async def _send_deltas(self, stream: sse.EventStream, options: StreamOptions) -> None:
        async for deltas in self._generation.deltas():
            for delta in deltas:
                _append(self._pending[delta.index], delta)
            if chunks := [self._take_chunk(delta.index, options) for delta in deltas if self._is_due(delta.index)]:
                await stream.send(b"".join(chunks))
        if options.include_usage:
            await stream.send(sse.event(self._renderer.usage_chunk(usage_of(self._generation))))

    def _is_due(self, index: int) -> bool:
        """Tokens that show no text yet (half a character, a held-back stop string) wait for those that do."""
        return bool(self._pending[index].text) or self._pending[index].finish_reason is not None

    def _take_chunk(self, index: int, options: StreamOptions) -> bytes:
        delta, self._pending[index] = self._pending[index], Delta(index)
        usage = usage_of(self._generation) if options.continuous_usage_stats else None
        return sse.event(self._renderer.chunk(delta, usage))


def _append(whole: Delta, delta: Delta) -> None:
    whole.text += delta.text
    whole.tokens += delta.tokens
    whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
