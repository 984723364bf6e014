"""Multimodal inputs on the fake runner, which checks that embeddings are there whenever their tokens are computed."""

import random

import pytest

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.encoder.cache import EncoderCache, MediaItem
from schedtop.engine.encoder.schedule import BudgetedEncoder
from schedtop.engine.errors import RequestRefused
from schedtop.engine.knobs import AdmissionRule, initial_knobs
from schedtop.engine.runner.fake import FakeRunner, hash_of_prefix
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.snapshot import FinishReason, LimitedBy, Viewport, WaitReason

PLACEHOLDER = 900


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


class Engine:
    """An engine with an encoder; `num_encoded` counts the embeddings the runner was asked for, by content."""

    def __init__(
        self,
        is_async: bool = False,
        num_blocks: int = 201,
        budget: int = 256,
        cache: int = 100,
        encoder_budget: int = 100,
        **knobs: object,
    ):
        config = EngineConfig(
            num_kv_blocks=num_blocks,
            max_num_batched_tokens=budget,
            max_num_seqs=16,
            encoder_cache_size=cache,
            max_num_encoder_tokens=encoder_budget,
        )
        self.runner = FakeRunner()
        knob_values = initial_knobs(config, async_scheduling=is_async, **knobs)
        self.core = EngineCore(config, self.runner, knob_values, clock=lambda: 0.0)
        self.num_encoded: dict[str, int] = {}
        self.outputs: dict[str, list[int]] = {}
        self.order: list[str] = []
        run_step = self.runner._run_step

        def count(output):  # type: ignore[no-untyped-def]
            for items in output.encoder_inputs.values():
                assert sum(item.num_tokens for item in items) <= encoder_budget
                for item in items:
                    self.num_encoded[item.content_hash] = self.num_encoded.get(item.content_hash, 0) + 1
            return run_step(output)

        self.runner._run_step = count  # type: ignore[method-assign]

    @property
    def cache(self) -> EncoderCache:
        encoder = self.core.scheduler.encoder
        assert isinstance(encoder, BudgetedEncoder)
        return encoder.cache

    def add(self, request_id: str, *media: tuple[str, int], start: int = 0, num_text: int = 8, max_tokens: int = 4):
        """A prompt of some text, then the media one after the other with two tokens of text behind each."""
        tokens, items = list(range(start, start + num_text)), []
        for content, size in media:
            items.append(MediaItem(content, len(tokens), size))
            tokens += [PLACEHOLDER] * size + [1, 2]
        self.core.add_request(request_id, tokens, SamplingParams(max_tokens=max_tokens), media=items)
        return tokens

    def step(self) -> None:
        done = self.core.step()
        assert self.core.self_check() == []
        cache = self.cache
        live = set(self.core.scheduler.requests)
        running = {request.request_id for request in self.core.scheduler.running}
        assert cache.num_used + cache.num_free == cache.capacity and cache.num_free >= 0
        assert cache.num_used == sum(entry.size for entry in cache._entries.values())
        assert set(cache._idle) == {content for content, entry in cache._entries.items() if not entry.readers}
        for entry in cache._entries.values():
            assert entry.readers <= live and entry.readers <= running
        for output in done.outputs if done else ():
            assert output.finish_reason is not FinishReason.ERROR, output.detail
            self.outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.order.append(output.request_id)

    def run(self) -> None:
        num_steps = 0
        while self.core.has_work:
            self.step()
            num_steps += 1
            assert num_steps < 5000
        assert self.core.snapshot(Viewport()).num_waiting == 0


def expected(tokens: list[int], num_tokens: int = 4) -> list[int]:
    tokens, first = list(tokens), len(tokens)
    for _ in range(num_tokens):
        tokens.append(hash_of_prefix()(tokens))
    return tokens[first:]


def test_waiting_requests_hold_no_encoder_entry_and_all_end(is_async: bool) -> None:
    engine = Engine(is_async, num_blocks=7)  # 70 + 4 tokens need 5 blocks: one runs at a time
    prompts = {name: engine.add(name, (f"image {name}", 60), start=100 * n) for n, name in enumerate("abc")}
    engine.run()
    assert engine.outputs == {name: expected(prompt) for name, prompt in prompts.items()}


def test_an_encoder_cache_without_room_blocks_by_name(is_async: bool) -> None:
    engine = Engine(is_async)
    engine.add("a", ("x", 60), max_tokens=6)
    engine.add("b", ("y", 60), num_text=0)
    engine.step()
    snapshot = engine.core.snapshot(Viewport())
    assert snapshot.waiting[0].wait_reason is WaitReason.ENCODER
    assert snapshot.waiting_by_reason == {WaitReason.ENCODER.value: 1}
    assert engine.core.scheduler.last_plan is not None
    assert engine.core.scheduler.last_plan.limited_by is LimitedBy.ENCODER
    engine.run()
    assert engine.order == ["a", "b"] or engine.order == ["b", "a"]


def test_the_same_image_in_many_requests_is_encoded_once(is_async: bool) -> None:
    engine = Engine(is_async)
    for index in range(6):
        engine.add(f"r{index}", ("same", 60), start=10 * index)
    engine.run()
    assert engine.num_encoded == {"same": 1}
    engine.add("later", ("same", 60), start=500)
    engine.run()
    assert engine.num_encoded == {"same": 1}


def test_an_image_that_is_evicted_is_encoded_again(is_async: bool) -> None:
    engine = Engine(is_async)
    for content in ("x", "y", "x"):
        engine.add(f"r{len(engine.order)}", (content, 60), start=10 * len(engine.order))
        engine.run()
    assert engine.num_encoded == {"x": 2, "y": 1}


def test_the_encoder_budget_is_whole_again_in_every_step() -> None:
    engine = Engine(cache=1000, encoder_budget=64)
    prompt = engine.add("r", *[(f"image {n}", 60) for n in range(5)])
    engine.run()
    assert engine.outputs["r"] == expected(prompt)
    assert engine.runner.num_steps >= 5


def test_a_share_ends_before_an_image_that_cant_be_encoded_in_this_step() -> None:
    engine = Engine(encoder_budget=60)
    engine.add("r", ("x", 60), ("y", 60))
    engine.step()
    assert engine.core.scheduler.running[0].num_computed_tokens == 8 + 60 + 2


def test_an_idle_image_about_to_be_read_isnt_evicted_for_its_neighbour(is_async: bool) -> None:
    engine = Engine(is_async)
    engine.add("first", ("x", 60))
    engine.run()
    prompt = engine.add("r", ("x", 60), ("y", 60), start=50)  # x is idle: its 60 aren't room for y
    engine.run()
    assert engine.outputs["r"] == expected(prompt)


def test_one_image_twice_in_a_prompt_is_encoded_once() -> None:
    engine = Engine()
    prompt = engine.add("r", ("x", 60), ("x", 60))
    engine.run()
    assert engine.num_encoded == {"x": 1} and engine.outputs["r"] == expected(prompt)


@pytest.mark.parametrize("item", [(101, 0), (60, -1), (60, 100), (0, 0)])
def test_media_that_can_never_be_encoded_are_refused(item: tuple[int, int]) -> None:
    size, offset = item
    with pytest.raises(RequestRefused, match="media input"):
        Engine().core.add_request("r", [1] * 120, SamplingParams(), media=[MediaItem("x", offset, size)])


@pytest.mark.parametrize("seed", range(8))
def test_whatever_mix_of_media_preemptions_and_aborts_all_end_right_and_the_books_balance(
    is_async: bool, seed: int
) -> None:
    rng = random.Random(seed)
    engine = Engine(is_async, num_blocks=rng.choice([16, 24, 40]), budget=rng.choice([48, 96]), cache=150,
                    encoder_budget=rng.choice([60, 150]),
                    admission=rng.choice(list(AdmissionRule)))  # fmt: skip
    prompts: dict[str, list[int]] = {}
    for index in range(12):
        media = [(f"image {rng.randrange(5)}", 0) for _ in range(rng.randrange(4))]
        sized = [(content, 20 + 8 * int(content[-1])) for content, _ in media]
        name = f"r{index}"
        prompts[name] = engine.add(name, *sized, start=rng.randrange(3) * 40, num_text=rng.randrange(1, 30))
        for _ in range(rng.randrange(4)):
            if engine.core.has_work:
                engine.step()
        if running := engine.core.scheduler.running:
            victim = rng.choice(running).request_id
            if rng.random() < 0.3:
                engine.core.preempt([victim])
            elif rng.random() < 0.2:
                engine.core.abort([victim])
                del prompts[victim]
    engine.run()
    for name, prompt in prompts.items():
        assert engine.outputs[name] == expected(prompt)
    assert engine.core.snapshot(Viewport()).pool.free == engine.core.config.num_usable_blocks
    assert engine.cache.num_reclaimable == engine.cache.capacity


# ---- prefix cache ------------------------------------------------------------------------------------------------


def prefix_hits(first: dict[str, object], second: dict[str, object]) -> int:
    """Prefix-cache hits of a second request after a first one, both with the same tokens."""
    engine = Engine(cache=1000, encoder_budget=1000)
    tokens = [PLACEHOLDER] * 64 + [1]
    for request_id, keys in (("a", first), ("b", second)):
        engine.core.add_request(request_id, tokens, SamplingParams(max_tokens=1), **keys)  # type: ignore[arg-type]
        engine.run()
    return engine.core.snapshot(Viewport()).counters.prefix_cache_hits


def media(*contents: str, size: int = 32, offset: int = 0) -> list[MediaItem]:
    return [MediaItem(content, offset + index * size, size) for index, content in enumerate(contents)]


def test_the_same_media_in_the_same_place_share_a_prefix() -> None:
    assert prefix_hits({"media": media("x", "y")}, {"media": media("x", "y")}) == 64


def test_a_prefix_is_shared_only_up_to_the_first_media_that_differ() -> None:
    assert prefix_hits({"media": media("x", "y")}, {"media": media("x", "z")}) == 32
    assert prefix_hits({"media": media("x", "y")}, {"media": media("y", "x")}) == 0


def test_media_and_bare_placeholder_tokens_share_no_prefix() -> None:
    assert prefix_hits({"media": media("x", "y")}, {}) == 0


def test_the_same_media_shifted_by_some_tokens_share_no_prefix() -> None:
    assert prefix_hits({"media": media("x", size=40)}, {"media": media("x", size=40, offset=3)}) == 0


def test_the_same_media_under_another_salt_or_adapter_share_no_prefix() -> None:
    items = media("x", "y")
    assert prefix_hits({"media": items, "cache_salt": "a"}, {"media": items, "cache_salt": "b"}) == 0
    assert prefix_hits({"media": items, "cache_salt": "a"}, {"media": items}) == 0
