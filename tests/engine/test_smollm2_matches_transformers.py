"""SmolLM2 through the whole engine against transformers on the same weights: greedy tokens, one by one.

Where transformers itself isn't sure (two likeliest logits closer than 1e-3) a token may differ; from there on the
texts are different ones and nothing more is compared.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.knobs import Knobs
from schedtop.engine.runner.loader.checkpoint import Checkpoint, open_checkpoint
from schedtop.engine.runner.loader.resolve import resolve_model
from schedtop.engine.runner.model_runner import ModelRunner
from schedtop.engine.runner.tokenizer import load_tokenizer
from schedtop.engine.sampling_params import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
NUM_TOKENS = 64
MARGIN = 1e-3
QUESTIONS = [
    "What is the capital of France?",
    "Write a short poem about rain in the mountains.",
    "Explain in two sentences why the sky is blue.",
    "List the first ten prime numbers, then say why 1 isn't among them.",
    "Übersetze ins Englische: Der Hund schläft unter dem großen Tisch.",
]
TEXTS = [
    "In 1984, the price of 42 apples was 3.14159 dollars, and by the year",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "The history of the city begins in the ninth century, when " * 12,
]


@dataclass
class Reference:
    prompt: list[int]
    tokens: list[int]
    is_sure: list[bool]
    """Of which tokens transformers was sure."""


class CachedCheckpoint(Checkpoint):
    """Reads each weight once for all runners of these tests."""

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner.name, inner.config, inner._source)
        self._taken: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        if name not in self._taken:
            self._taken[name] = super().take(name, shape)
        return self._taken[name]


@pytest.fixture(scope="module", autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(min(2, before))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return CachedCheckpoint(open_checkpoint("smollm2"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer("smollm2")
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS]
    return chats + [tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def references(prompts: list[list[int]]) -> list[Reference]:
    from transformers import AutoModelForCausalLM, GgufConfig

    path = resolve_model("smollm2")
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    model.generation_config.eos_token_id = None
    return [_greedy(model, prompt) for prompt in prompts]


def _greedy(model: Any, prompt: list[int]) -> Reference:
    ids = torch.tensor([prompt])
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(result.logits).topk(2).values
    is_sure = (best[:, 0] - best[:, 1] >= MARGIN).tolist()
    return Reference(prompt, result.sequences[0, len(prompt) :].tolist(), is_sure)


Runners = Callable[..., ModelRunner]


@pytest.fixture(scope="module")
def make_runner(checkpoint: Checkpoint) -> Runners:
    return lambda config, dtype="fp32", backend="auto": ModelRunner(checkpoint, config, dtype=dtype, backend=backend)


def make_config(**overrides: object) -> EngineConfig:
    return EngineConfig(**{"num_kv_blocks": 300, "max_model_len": 1024, **overrides})


def generate(
    core: EngineCore, prompts: Sequence[list[int]], name: str = "r", every: int = 0, cached: list[int] | None = None
) -> list[list[int]]:
    """Greedy tokens of each prompt; with `every`, one request more joins each so many steps. `cached` takes the
    number of prompt tokens that were found in the prefix cache, per request."""
    outputs: list[list[int]] = [[] for _ in prompts]
    settings = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    waiting = list(enumerate(prompts))
    num_steps = 0
    while waiting or core.has_work:
        while waiting and (not every or num_steps >= every * (len(prompts) - len(waiting))):
            index, prompt = waiting.pop(0)
            core.add_request(f"{name}{index}", prompt, settings)
        result = core.step()
        num_steps += 1
        for output in result.outputs if result else []:
            outputs[int(output.request_id.removeprefix(name))] += output.new_token_ids
            if cached is not None and output.finish_reason is not None:
                cached.append(output.num_cached_tokens)
    assert core.self_check() == []
    return outputs


def assert_equal(outputs: Sequence[list[int]], references: Sequence[Reference]) -> None:
    for output, reference in zip(outputs, references, strict=True):
        assert is_same_text(output, reference)


def is_same_text(output: list[int], reference: Reference) -> bool:
    """Equal to the end, or up to a token that transformers wasn't sure of."""
    assert len(output) == NUM_TOKENS
    differing = [index for index in range(NUM_TOKENS) if output[index] != reference.tokens[index]]
    return not differing or not reference.is_sure[differing[0]]


def test_transformers_is_sure_of_nearly_all_its_tokens(references: list[Reference]) -> None:
    assert sum(sum(reference.is_sure) for reference in references) >= 0.95 * NUM_TOKENS * len(references)


def test_all_prompts_in_one_batch(make_runner: Runners, prompts: list[list[int]], references: list[Reference]) -> None:
    config = make_config()
    assert_equal(generate(EngineCore(config, make_runner(config)), prompts), references)


@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_prompts_in_small_chunks_beside_decodes(
    make_runner: Runners, prompts: list[list[int]], references: list[Reference], block_size: int
) -> None:
    config = make_config(block_size=block_size, num_kv_blocks=4800 // block_size)
    knobs = Knobs(max_num_batched_tokens=40, max_num_seqs=5, long_prefill_token_threshold=13)
    core = EngineCore(config, make_runner(config), knobs)
    assert_equal(generate(core, prompts, every=3), references)


def test_preempted_requests_go_on_as_if_nothing_had_been(
    make_runner: Runners, prompts: list[list[int]], references: list[Reference]
) -> None:
    config = make_config(num_kv_blocks=26)
    core = EngineCore(config, make_runner(config))
    assert_equal(generate(core, prompts), references)
    assert core.scheduler.stats.preemptions > 0


def test_prompts_found_in_the_prefix_cache(
    make_runner: Runners, prompts: list[list[int]], references: list[Reference]
) -> None:
    config = make_config()
    core = EngineCore(config, make_runner(config))
    long = max(range(len(prompts)), key=lambda index: len(prompts[index]))
    generate(core, [prompts[long]], "first")
    again = [prompts[long], prompts[long][:64] + prompts[0], prompts[long]]
    cached: list[int] = []
    outputs = generate(core, again, "again", cached=cached)
    assert_equal([outputs[0], outputs[2]], [references[long]] * 2)
    assert min(cached) >= 64


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_drafts_change_nothing_but_the_number_of_steps(
    make_runner: Runners, prompts: list[list[int]], references: list[Reference], is_async: bool
) -> None:
    config = make_config(max_num_speculative_tokens=3)
    core = EngineCore(config, make_runner(config), Knobs(num_speculative_tokens=3, async_scheduling=is_async))
    assert_equal(generate(core, prompts), references)
    assert core.scheduler.stats.accepted_tokens > 0
    core.shutdown()


def test_planning_a_step_ahead_changes_nothing(
    make_runner: Runners, prompts: list[list[int]], references: list[Reference]
) -> None:
    config = make_config()
    core = EngineCore(config, make_runner(config), Knobs(async_scheduling=True, max_num_batched_tokens=64))
    assert_equal(generate(core, prompts, every=2), references)
    core.shutdown()


def test_half_precision_weights_keep_the_text(
    make_runner: Runners, prompts: list[list[int]], references: list[Reference]
) -> None:
    config = make_config()
    runner = make_runner(config, dtype="auto")
    outputs = generate(EngineCore(config, runner), prompts)
    equal = [is_same_text(output, reference) for output, reference in zip(outputs, references, strict=True)]
    assert sum(equal) >= len(equal) - 1
