"""Executes planned steps with a real model: update the batch, forward, sample, verify drafts, report.

The runner keeps tokens, positions and blocks of its requests itself, so a step may be planned before the tokens of
the one before are known. Rules of scheduling are not here; nor is what a model or an attention kernel computes.
"""

import secrets
from collections.abc import Mapping
from pathlib import Path

import torch

from schedtop.engine.config import EngineConfig
from schedtop.engine.errors import ConfigError
from schedtop.engine.runner.batch import InputBatch, StepBatch
from schedtop.engine.runner.kv_memory import PagedMemory
from schedtop.engine.runner.kv_transfer import BlockMemory, KVTransfer, NoTransfer, run_with_transfers
from schedtop.engine.runner.loader.checkpoint import Checkpoint, open_checkpoint
from schedtop.engine.runner.loader.peft import load_adapter
from schedtop.engine.runner.models.llama import LlamaModel
from schedtop.engine.runner.models.lora import AdapterBuilder, AdapterRows
from schedtop.engine.runner.placement import RunnerInfo, choose_placement
from schedtop.engine.runner.prompt_logprobs import PromptLogprobs
from schedtop.engine.runner.sampler import Sampler
from schedtop.engine.runner.stopwatch import NoStopwatch, Stopwatch
from schedtop.engine.runner.verify import sample_step
from schedtop.engine.sched.output import ModelRunnerOutput, SchedulerOutput
from schedtop.engine.spec.ngram import Proposer, propose_ngram


class ModelRunner:
    """Implements the protocol of this name in `base.py` with torch.

    `model` is a path, `smollm2`, a hub id, or a checkpoint opened before. `dtype` is auto, fp16, fp32 (or bf16 on
    CUDA), `backend` auto or an attention backend's name, `adapters` PEFT folders by the names that requests use.
    Raises `ConfigError` for what can't work together.
    """

    def __init__(
        self,
        model: str | Checkpoint,
        config: EngineConfig,
        *,
        dtype: str = "auto",
        backend: str = "auto",
        device: str = "auto",
        num_threads: int | None = None,
        adapters: Mapping[str, Path] | None = None,
        proposer: Proposer = propose_ngram,
        stopwatch: Stopwatch | None = None,
    ) -> None:
        checkpoint = open_checkpoint(model) if isinstance(model, str) else model
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        model_config = checkpoint.config
        _refuse_unsupported(config, adapters or {})
        max_len = _check_length(config, model_config.max_context)
        placement = choose_placement(model_config, config.block_size, dtype=dtype, backend=backend, device=device)
        self.config = config
        self._watch = stopwatch or NoStopwatch()
        self.info: RunnerInfo = placement.info(checkpoint, config)
        max_positions = max_len + config.max_num_speculative_tokens + 1
        loaded = [load_adapter(name, path, model_config) for name, path in (adapters or {}).items()]
        self._adapter_rows = AdapterRows(placement.device)
        self.model = LlamaModel(
            checkpoint,
            self._watch.attention(placement.attention),
            self._watch.linear(placement.make_linear),
            max_positions,
            placement.device,
            placement.compute_dtype,
            AdapterBuilder(loaded, self._adapter_rows, placement.device, placement.compute_dtype),
        )
        shape = (2, config.num_kv_blocks, config.block_size, model_config.num_kv_heads, model_config.head_size)
        self.kv_caches = [
            torch.zeros(shape, dtype=placement.cache_dtype, device=placement.device)
            for _ in range(model_config.num_layers)
        ]
        """One tensor per layer: a single one for all, written in place, would hinder torch."""
        self.memory: BlockMemory = PagedMemory(self.kv_caches)
        self.transfer: KVTransfer = NoTransfer()
        self.batch = InputBatch(config.max_num_seqs, max_positions, config.block_size, placement.device)
        self._sampler = Sampler(model_config.eos_token_ids)
        self._prompt_logprobs = PromptLogprobs(self.batch, self.model.logits)
        self._num_drafts = config.max_num_speculative_tokens
        self._proposer = proposer

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; see `base.py`."""
        return run_with_transfers(self.transfer, scheduler_output, self._run_step)

    def _run_step(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self._update(scheduler_output)
        output = ModelRunnerOutput(sampled_token_ids=[[] for _ in scheduler_output.num_scheduled_tokens])
        if not output.sampled_token_ids:
            return output
        drafts = scheduler_output.scheduled_spec_decode_tokens
        step = self.batch.prepare(scheduler_output.num_scheduled_tokens, drafts)
        self._adapter_rows.route([request.adapter for request in step.requests], step.meta.query_lens)
        hidden = self.model.forward(step.token_ids, step.positions, self.kv_caches, step.meta)
        self._prompt_logprobs.collect(step, hidden, output)
        self.batch.advance(step)
        if step.sampled_of:
            logits = self.model.logits(hidden[step.sampled_rows])
            with self._watch.span("sampling"):
                sample_step(self._sampler, self.batch, step, logits, output)
            self.batch.settle_drafts(step)
            self._propose(step, output)
        return output

    def shutdown(self) -> None:
        """Give back the memory; idempotent."""
        self.transfer.shutdown()
        self.batch.remove(list(self.batch.requests))
        self.kv_caches = []

    def _update(self, output: SchedulerOutput) -> None:
        gone = [*output.finished_req_ids, *output.preempted_req_ids]
        self.batch.remove(gone)
        self._prompt_logprobs.forget([*gone, *(new.req_id for new in output.scheduled_new_reqs)])
        new_ids = set()
        for new in output.scheduled_new_reqs:
            seed = new.sampling_params.seed
            self.batch.add(new, secrets.randbits(63) if seed is None else seed)
            new_ids.add(new.req_id)
        for req_id, block_ids in output.scheduled_cached_reqs.new_block_ids.items():
            if req_id not in new_ids:
                self.batch.append_blocks(req_id, block_ids)

    def _propose(self, step: StepBatch, output: ModelRunnerOutput) -> None:
        """Drafts for the next step, kept here too: with steps in flight they are planned before they are known."""
        if not self._num_drafts:
            return
        for index, _ in step.sampled_of:
            request = step.requests[index]
            request.proposed = self._proposer(self.batch.tokens_of(request).tolist(), self._num_drafts)
            output.draft_token_ids[request.req_id] = request.proposed


def _refuse_unsupported(config: EngineConfig, adapters: Mapping[str, Path]) -> None:
    """What the scheduler would plan for but this runner can't compute."""
    if sorted(config.adapters) != sorted(adapters):
        raise ConfigError(
            f"the scheduler knows the adapters {', '.join(sorted(config.adapters)) or 'none'}, the runner is given "
            f"{', '.join(sorted(adapters)) or 'none'}: name the same"
        )
    if config.max_adapters and not adapters:
        raise ConfigError(f"max_adapters={config.max_adapters}, but no adapter is given: name some or set it to 0")
    if config.encoder_cache_size:
        raise ConfigError(
            f"encoder_cache_size={config.encoder_cache_size}: the real runner has no media encoder yet; set it to 0"
        )


def _check_length(config: EngineConfig, max_context: int) -> int:
    """The longest context to prepare for."""
    if config.max_model_len is None:
        return max_context
    if config.max_model_len > max_context:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the {max_context} tokens the model was made for: lower it"
        )
    return config.max_model_len
