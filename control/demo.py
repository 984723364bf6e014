"""The demo's load: people who chat, now and then a long document, and short questions right behind it.

A client like any other: it talks to the control socket and knows nothing of the engine. The sizes are chosen so that a
pool of some 80 blocks overflows within seconds: a queue builds up and somebody is preempted, while text is generated.
"""

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from schedtop.control.client import Client, CommandRefused, Disconnected
from schedtop.control.messages import AbortRequests, AddRequest, Goodbye, RequestFilter, TokenBatch
from schedtop.engine.sampling_params import SamplingParams

NUM_CHATS = 10
LONG_EVERY_S = 12.0
NUM_SHORTS = 3
ID_PREFIX = "demo-"
NUM_KEPT_AT_END = 8
"""Tokens of a shortened prompt's end that stay."""

_TOPICS = (
    "the sea at night", "how bread rises", "a train across the mountains", "why leaves turn red", "an old lighthouse",
    "the first snow", "how bees find home", "a market in the morning", "a clock that runs backwards", "river stones",
)  # fmt: skip
_QUESTIONS = ("What is the capital of France?", "Name three colours.", "What is two plus three?", "Say hello.")

ApplyTemplate = Callable[[str], list[int]]
"""Turns what a user says into the prompt's token ids, chat template included."""


@dataclass(slots=True)
class _Answer:
    is_done: asyncio.Event = field(default_factory=asyncio.Event)


class DemoLoad:
    """Keeps an engine busy over one connection until it is stopped.

    `num_tokens` counts the tokens that have come back, `latest` holds the newest of one chat for display.
    """

    def __init__(self, client: Client, apply_template: ApplyTemplate, max_prompt_tokens: int, seed: int = 0) -> None:
        self.num_tokens = 0
        self.latest: list[int] = []
        self._client = client
        self._apply_template = apply_template
        self._max_prompt_tokens = max_prompt_tokens
        self._random = random.Random(seed)
        self._numbers = itertools.count(1)
        self._answers: dict[str, _Answer] = {}

    async def run(self) -> None:
        """Generate load until cancelled; raises `Disconnected` when the engine goes away."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._listen())
                for place in range(NUM_CHATS):
                    tasks.create_task(self._chat(place))
                tasks.create_task(self._documents())
        except* Disconnected as gone:
            reason = str(gone.exceptions[0])
        else:
            return
        raise Disconnected(reason)

    async def stop(self) -> None:
        """Abort what is still under way."""
        await self._client.request(
            AbortRequests(select=RequestFilter(id_prefix=ID_PREFIX), reason="the demo has ended")
        )

    async def _listen(self) -> None:
        async for message in self._client.messages():
            match message:
                case TokenBatch():
                    for output in message.outputs:
                        self._take(output.request_id, output.token_ids, output.finish_reason is not None)
                case Goodbye():
                    raise Disconnected(message.reason)

    def _take(self, request_id: str, token_ids: list[int], is_end: bool) -> None:
        self.num_tokens += len(token_ids)
        if request_id.startswith(f"{ID_PREFIX}chat0"):
            self.latest = [] if is_end else (self.latest + token_ids)[-40:]
        if is_end and (answer := self._answers.get(request_id)):
            answer.is_done.set()

    async def _chat(self, place: int) -> None:
        """One person: asks, reads the answer, asks again."""
        while True:
            topic = self._random.choice(_TOPICS)
            text = f"Write a long story about {topic}. Take your time and describe every detail."
            await self._ask(f"chat{place}", self._apply_template(text), self._random.randint(120, 260))

    async def _documents(self) -> None:
        """Every so often a long document to summarise, and short questions that arrive just after it."""
        while True:
            await asyncio.sleep(LONG_EVERY_S / 2)
            sentence = f"Chapter {self._random.randint(1, 99)} tells of {self._random.choice(_TOPICS)}. "
            prompt = self._cut(self._apply_template("Summarise this. " + sentence * 200))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._ask("document", prompt, 30))
                await asyncio.sleep(0.05)
                for number in range(NUM_SHORTS):
                    question = self._random.choice(_QUESTIONS)
                    tasks.create_task(self._ask(f"short{number}", self._apply_template(question), 16))
            await asyncio.sleep(LONG_EVERY_S / 2)

    def _cut(self, prompt: list[int]) -> list[int]:
        """Shorten a document, but keep the end, where the template hands over to the model."""
        return prompt[: self._max_prompt_tokens - NUM_KEPT_AT_END] + prompt[-NUM_KEPT_AT_END:]

    async def _ask(self, who: str, prompt: list[int], max_tokens: int) -> None:
        request_id = f"{ID_PREFIX}{who}-{next(self._numbers)}"
        answer = self._answers[request_id] = _Answer()
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0.8, top_k=50, seed=self._random.randrange(1 << 30)
        )
        try:
            await self._client.request(
                AddRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling), timeout_s=None
            )
            await answer.is_done.wait()
        except CommandRefused:
            await asyncio.sleep(1.0)  # the queue is bounded, or paused by an operator: ask again later
        finally:
            del self._answers[request_id]
