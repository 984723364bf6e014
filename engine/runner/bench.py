"""Contenders of `schedtop bench engine` that run in its own process: our engine, and transformers on the same weights.

Also what waiting requests cost our steps. Servers are in `control/bench_servers.py`; what is printed and how often
rounds alternate is the command line's business.
"""

import time
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.knobs import Knobs
from schedtop.engine.outputs import EngineCoreOutputs
from schedtop.engine.runner.bench_load import Load, Prompts, Round
from schedtop.engine.runner.loader.resolve import resolve_model
from schedtop.engine.runner.model_runner import ModelRunner
from schedtop.engine.runner.stopwatch import Stopwatch
from schedtop.engine.runner.tokenizer import load_tokenizer
from schedtop.engine.sampling_params import SamplingParams

STEPS_IN_A_ROW = 4
"""Steps with the same number waiting; the first of them isn't counted, since it takes in what came or went."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one step: all of it, and what of it isn't the model's (scheduling and bookkeeping)."""

    seconds: float
    scheduling_s: float


class OurEngine:
    """The scheduler, the runner and the books, as `schedtop serve` runs them, without the sockets."""

    def __init__(self, model: str, dtype: str, num_threads: int, largest: Load) -> None:
        self.name = f"schedtop {dtype}"
        config = EngineConfig(
            num_kv_blocks=largest.num_kv_blocks,
            max_num_seqs=largest.concurrency,
            max_model_len=largest.length + 1,
        )
        self._watch = Stopwatch()
        runner = ModelRunner(model, config, dtype=dtype, num_threads=num_threads, stopwatch=self._watch)
        self.info = runner.info
        knobs = Knobs(max_num_seqs=largest.concurrency, prefix_caching=False)
        self._core = EngineCore(config, runner, knobs)
        self._ids = count()

    def run(self, prompts: Prompts, output_tokens: int) -> Round:
        """See `Contender`."""
        self._watch.seconds.clear()
        num_steps, forward_s = 0, 0.0
        start = time.perf_counter()
        ids = self._add(prompts, output_tokens)
        answers: dict[str, list[int]] = {request_id: [] for request_id in ids}
        while self._core.has_work:
            result = self._core.step()
            if result is None or result.record is None:
                continue
            num_steps += 1
            forward_s += result.record.forward_s
            for output in result.outputs:
                answers[output.request_id] += output.new_token_ids
        seconds = time.perf_counter() - start
        assert all(len(answer) == output_tokens for answer in answers.values())
        return Round(
            tokens_per_s=len(prompts) * output_tokens / seconds,
            answers=list(answers.values()),
            num_steps=num_steps,
            split=self._split(seconds, forward_s),
        )

    def _add(self, prompts: Prompts, output_tokens: int) -> list[str]:
        settings = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        ids = [f"request-{next(self._ids)}" for _ in prompts]
        for request_id, prompt in zip(ids, prompts, strict=True):
            self._core.add_request(request_id, prompt, settings)
        return ids

    def _split(self, seconds: float, forward_s: float) -> dict[str, float]:
        parts = dict(self._watch.seconds)
        parts["rest of the forward pass"] = forward_s - sum(parts.values())
        parts["scheduling and bookkeeping"] = seconds - forward_s
        return parts

    def steps_with_waiting(self, prompts: Prompts, output_tokens: int, num_waiting: int) -> dict[int, list[Step]]:
        """Steps in which all prompts decode, with none waiting and with `num_waiting`, a few of each in turn.

        As many run as may, so whoever comes waits. Returns number waiting -> steps; both as many. Their contexts grow
        alike, since the two alternate within one batch.
        """
        seats = self._core.scheduler.knobs.max_num_seqs
        self._core.set_knobs({"max_num_seqs": len(prompts)})
        self._add(prompts, output_tokens)
        result = self._timed_step()[0]
        while result is None or result.record is None or result.record.num_decode_tokens < len(prompts):
            result = self._timed_step()[0]
        steps: dict[int, list[Step]] = {0: [], num_waiting: []}
        left = output_tokens - 2
        while left >= 2 * STEPS_IN_A_ROW:
            left -= 2 * STEPS_IN_A_ROW
            steps[0] += self._steps_in_a_row(0)
            waiting = self._add([prompts[0]] * num_waiting, output_tokens)
            steps[num_waiting] += self._steps_in_a_row(num_waiting)
            self._core.abort(waiting)
        while self._core.has_work:
            self._core.step()
        self._core.set_knobs({"max_num_seqs": seats})
        return steps

    def _steps_in_a_row(self, num_waiting: int) -> list[Step]:
        steps = []
        for _ in range(STEPS_IN_A_ROW):
            result, seconds = self._timed_step()
            record = result.record if result is not None else None
            assert record is not None and record.num_waiting == num_waiting and record.num_prefill_tokens == 0
            steps.append(Step(seconds=seconds, scheduling_s=seconds - record.forward_s))
        return steps[1:]

    def _timed_step(self) -> tuple[EngineCoreOutputs | None, float]:
        start = time.perf_counter()
        result = self._core.step()
        return result, time.perf_counter() - start


class Transformers:
    """`generate` of transformers, fp32, all prompts in one batch."""

    name = "transformers generate fp32"

    def __init__(self, model: str, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._model = _load_with_transformers(resolve_model(model))
        self._model.generation_config.eos_token_id = None

    def run(self, prompts: Prompts, output_tokens: int) -> Round:
        """See `Contender`."""
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        result = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=output_tokens, do_sample=False
        )
        seconds = time.perf_counter() - start
        answers: list[list[int]] = result[:, ids.shape[1] :].tolist()
        assert all(len(answer) == output_tokens for answer in answers)
        return Round(tokens_per_s=len(prompts) * output_tokens / seconds, answers=answers)


def save_as_folder(model: str, folder: Path) -> Path:
    """The model as a Hugging Face folder, for peers that read no GGUF: its own, or written to `folder` in fp32."""
    path = resolve_model(model)
    if path.is_dir():
        return path
    from transformers import PreTrainedTokenizerFast

    loaded = _load_with_transformers(path)
    loaded.config.quantization_config = None
    loaded.save_pretrained(folder)
    load_tokenizer(model).write(folder / "tokenizer.json")
    wrap: Any = PreTrainedTokenizerFast
    wrap(tokenizer_file=str(folder / "tokenizer.json")).save_pretrained(folder)
    return folder


def _load_with_transformers(path: Path) -> Any:
    from transformers import AutoModelForCausalLM, GgufConfig
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar
    quiet()
    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=config
    )
