"""Measures the engine on a real model, and transformers on the same weights, for `schedtop bench engine`.

A round answers a number of requests at once: prompts of equal length, greedy, a fixed number of tokens each. What is
printed and how often rounds alternate is the command line's business.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.knobs import Knobs
from schedtop.engine.runner.loader.resolve import resolve_model
from schedtop.engine.runner.model_runner import ModelRunner
from schedtop.engine.runner.stopwatch import Stopwatch
from schedtop.engine.sampling_params import SamplingParams


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What one round is made of."""

    concurrency: int
    prompt_tokens: int = 200
    output_tokens: int = 64

    def prompts(self, vocab_size: int, number: int) -> list[list[int]]:
        """Random prompts, other ones in each round, so that no prefix cache helps."""
        generator = torch.Generator().manual_seed(number)
        shape = (self.concurrency, self.prompt_tokens)
        tokens: list[list[int]] = torch.randint(100, vocab_size - 100, shape, generator=generator).tolist()
        return tokens


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One round's result."""

    tokens_per_s: float
    split: dict[str, float] = {}
    """Share of the round's time by what it was spent on; sums to 1."""


class Contender(Protocol):
    """Something that answers a load."""

    name: str

    def run(self, load: Load, number: int) -> Round:
        """Answer the load's requests, all at once."""
        ...


class OurEngine:
    """The scheduler, the runner and the books, as `schedtop serve` runs them, without the sockets."""

    def __init__(self, model: str, dtype: str, num_threads: int, largest: Load) -> None:
        self.name = f"schedtop {dtype}"
        length = largest.prompt_tokens + largest.output_tokens
        blocks_each = -(-length // 16) + 1
        config = EngineConfig(
            num_kv_blocks=largest.concurrency * blocks_each + 1,
            max_num_seqs=largest.concurrency,
            max_model_len=length + 1,
        )
        self._watch = Stopwatch()
        runner = ModelRunner(model, config, dtype=dtype, num_threads=num_threads, stopwatch=self._watch)
        self.info = runner.info
        knobs = Knobs(max_num_seqs=largest.concurrency, prefix_caching=False)
        self._core = EngineCore(config, runner, knobs)

    def run(self, load: Load, number: int) -> Round:
        """See `Contender`."""
        prompts = load.prompts(self.info.vocab_size, number)
        settings = SamplingParams(max_tokens=load.output_tokens, temperature=0.0, ignore_eos=True)
        self._watch.seconds.clear()
        num_tokens, forward_s = 0, 0.0
        start = time.perf_counter()
        for index, prompt in enumerate(prompts):
            self._core.add_request(f"{number}-{index}", prompt, settings)
        while self._core.has_work:
            result = self._core.step()
            if result is not None:
                num_tokens += sum(len(output.new_token_ids) for output in result.outputs)
                forward_s += result.record.forward_s if result.record is not None else 0.0
        seconds = time.perf_counter() - start
        assert num_tokens == load.concurrency * load.output_tokens
        return Round(tokens_per_s=num_tokens / seconds, split=self._split(seconds, forward_s))

    def _split(self, seconds: float, forward_s: float) -> dict[str, float]:
        parts = dict(self._watch.seconds)
        parts["rest of the forward pass"] = forward_s - sum(parts.values())
        parts["scheduling and bookkeeping"] = seconds - forward_s
        return {what: part / seconds for what, part in parts.items()}


class Transformers:
    """`generate` of transformers, fp32, all prompts in one batch."""

    name = "transformers generate fp32"

    def __init__(self, model: str, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._model = _load_with_transformers(resolve_model(model))
        self._model.generation_config.eos_token_id = None

    def run(self, load: Load, number: int) -> Round:
        """See `Contender`."""
        ids = torch.tensor(load.prompts(self._model.config.vocab_size, number))
        start = time.perf_counter()
        result = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=load.output_tokens, do_sample=False
        )
        seconds = time.perf_counter() - start
        num_tokens = (result.shape[1] - ids.shape[1]) * len(ids)
        assert num_tokens == load.concurrency * load.output_tokens
        return Round(tokens_per_s=num_tokens / seconds)


def _load_with_transformers(path: Path) -> Any:
    from transformers import AutoModelForCausalLM, GgufConfig

    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=config
    )


def alternate(contenders: Sequence[Contender], load: Load, num_rounds: int) -> dict[str, list[Round]]:
    """Rounds of all contenders in turn, so that what else the machine does touches all alike; one unmeasured first."""
    rounds: dict[str, list[Round]] = {contender.name: [] for contender in contenders}
    warm_up = msgspec.structs.replace(load, prompt_tokens=min(16, load.prompt_tokens), output_tokens=2)
    for contender in contenders:
        contender.run(warm_up, 0)
    for number in range(1, num_rounds + 1):
        for contender in contenders:
            rounds[contender.name].append(contender.run(load, number))
    return rounds
