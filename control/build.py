"""From settings to an engine: sizes, runner, core, and how it introduces itself.

The real runner (and with it torch) is imported only when it is asked for.
"""

import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from schedtop import __version__
from schedtop.control.messages import EngineInfo
from schedtop.control.settings import ServeSettings, parse_memory
from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.errors import ConfigError
from schedtop.engine.knobs import initial_knobs
from schedtop.engine.perf import ModelShape
from schedtop.engine.runner.base import ModelRunner
from schedtop.engine.sched.interface import load_scheduler
from schedtop.engine.sched.scheduler import Scheduler
from schedtop.engine.structured.backend import GrammarBackend

if TYPE_CHECKING:
    from schedtop.engine.runner.loader.checkpoint import Checkpoint
    from schedtop.engine.runner.models.config import ModelConfig
    from schedtop.engine.runner.placement import Placement, RunnerInfo

DEFAULT_KV_MEMORY = "512MiB"
"""KV cache of a model when neither blocks nor memory are given."""
NUM_BLOCKS_WITHOUT_MODEL = 1000
MAX_LEN_WITHOUT_MODEL = 4096


class _Parts(NamedTuple):
    """What differs between runners."""

    config: EngineConfig
    runner: ModelRunner
    backend: str
    model_path: str = ""
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int | None = None
    grammars: GrammarBackend | None = None
    shape: ModelShape | None = None


def build(settings: ServeSettings) -> tuple[EngineCore, EngineInfo]:
    """Allocate everything. Raises `ConfigError`, or `KnobRefused` for a start value out of range."""
    make_scheduler = load_scheduler(settings.scheduler_cls) if settings.scheduler_cls else Scheduler
    parts = _real(settings) if settings.runner == "real" else _without_model(settings)
    config = parts.config
    knobs = initial_knobs(config, **settings.knobs)
    core = EngineCore(
        config,
        parts.runner,
        scheduler=make_scheduler(config, knobs, clock=time.monotonic),
        eos_token_ids=parts.eos_token_ids,
        vocab_size=parts.vocab_size,
        grammar_backend=parts.grammars,
    )
    if settings.kv_store is not None:
        _share_kv(settings.kv_store, settings, parts, core)
    info = EngineInfo(
        name=config.name,
        model=config.model,
        boot_id=secrets.token_hex(8),
        pid=os.getpid(),
        version=__version__,
        block_size=config.block_size,
        num_usable_blocks=config.num_usable_blocks,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        backend=parts.backend,
        started_wall=time.time(),
        eos_token_ids=list(parts.eos_token_ids),
        model_path=parts.model_path,
        adapters=list(config.adapters),
        shape=parts.shape,
    )
    return core, info


def _share_kv(url: str, settings: ServeSettings, parts: _Parts, core: EngineCore) -> None:
    from schedtop.engine.kv.connector.attach import attach_store, open_store
    from schedtop.engine.runner.kv_transfer import TransferringRunner
    from schedtop.engine.runner.loader.fingerprint import fingerprint

    runner = parts.runner
    if not isinstance(runner, TransferringRunner):
        raise ConfigError(f"kv_store={url} needs a model (or runner fake): a {settings.runner} runner keeps no KV")
    model = fingerprint(Path(parts.model_path)) if parts.model_path else settings.runner
    attach_store(core, runner, open_store(url, runner.memory.format(model, settings.kv_namespace)))


def _config(settings: ServeSettings, model: str, num_kv_blocks: int, max_model_len: int) -> EngineConfig:
    return EngineConfig(
        name=settings.name,
        model=settings.served_model_name or model,
        block_size=settings.block_size,
        num_kv_blocks=num_kv_blocks,
        max_model_len=max_model_len,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_num_speculative_tokens=settings.max_num_speculative_tokens,
        adapters=tuple(settings.lora),
        max_adapters=len(settings.lora) if settings.max_adapters is None else settings.max_adapters,
    )


def _without_model(settings: ServeSettings) -> _Parts:
    if settings.kv_memory is not None:
        raise ConfigError(
            f"kv_memory={settings.kv_memory} needs a model; give num_kv_blocks to a {settings.runner} one"
        )
    num_blocks = NUM_BLOCKS_WITHOUT_MODEL if settings.num_kv_blocks is None else settings.num_kv_blocks
    max_model_len = MAX_LEN_WITHOUT_MODEL if settings.max_model_len is None else settings.max_model_len
    config = _config(settings, settings.runner, num_blocks, max_model_len)
    if settings.runner == "fake":
        from schedtop.engine.runner.fake import FakeRunner

        return _Parts(config, FakeRunner(config.block_size), "no model: tokens are hashes of their prefix")
    from schedtop.engine.runner.simulated import SimulatedRunner
    from schedtop.engine.sim.step_model import PAPER_MODEL

    return _Parts(config, SimulatedRunner(PAPER_MODEL), "no model: simulated step times")


def _open(settings: ServeSettings) -> "tuple[Checkpoint, Placement, EngineConfig]":
    """The model's file, opened, where it would be computed, and the engine's sizes; no weight is read yet."""
    if settings.wait_policy != "auto":
        os.environ["OMP_WAIT_POLICY"] = settings.wait_policy  # OpenMP reads it once, when torch brings it in
    from schedtop.engine.runner.loader.checkpoint import open_checkpoint
    from schedtop.engine.runner.loader.resolve import resolve_model
    from schedtop.engine.runner.placement import check_kv_memory, choose_placement, num_blocks_for

    choices = {"dtype": settings.dtype, "backend": settings.attention, "device": settings.device}
    path = resolve_model(settings.model)
    checkpoint = open_checkpoint(str(path))
    num_blocks = settings.num_kv_blocks
    placement = choose_placement(checkpoint.config, settings.block_size, **choices)
    if num_blocks is None:
        memory = parse_memory(settings.kv_memory or DEFAULT_KV_MEMORY)
        num_blocks = num_blocks_for(memory, checkpoint.config, settings.block_size, placement.cache_dtype)
    check_kv_memory(num_blocks, checkpoint.config, settings.block_size, placement)
    longest = min(checkpoint.config.max_context, (num_blocks - 1) * settings.block_size)
    max_model_len = longest if settings.max_model_len is None else settings.max_model_len
    return checkpoint, placement, _config(settings, Path(settings.model).stem, num_blocks, max_model_len)


def explain_memory(settings: ServeSettings) -> list[str]:
    """What this engine would hold in memory, as lines to read. Raises `ConfigError` as starting it would."""
    if settings.runner != "real":
        raise ConfigError(f"a {settings.runner} runner holds no model: there is no memory to explain")
    from schedtop.engine.runner.loader.peft import load_adapter
    from schedtop.engine.runner.memory_plan import plan_memory

    checkpoint, placement, config = _open(settings)
    adapters = [load_adapter(name, path, checkpoint.config) for name, path in _adapter_paths(settings).items()]
    parts = plan_memory(checkpoint.config, config, placement, adapters)
    total = sum(part.num_bytes for part in parts)
    return [
        f"{config.model} on {placement.device}: {placement.dtype_reason}",
        *(f"  {part.name:<14}{part.num_bytes / 2**20:>10,.1f} MiB  {part.because}" for part in parts),
        f"  {'total':<14}{total / 2**20:>10,.1f} MiB  and the process with its libraries, a few hundred MiB",
    ]


def _adapter_paths(settings: ServeSettings) -> dict[str, Path]:
    return {name: Path(path).expanduser() for name, path in settings.lora.items()}


def _real(settings: ServeSettings) -> _Parts:
    from schedtop.engine.runner.grammar_xgrammar import backend_for
    from schedtop.engine.runner.model_runner import ModelRunner

    checkpoint, _, config = _open(settings)
    runner = ModelRunner(
        checkpoint,
        config,
        dtype=settings.dtype,
        backend=settings.attention,
        device=settings.device,
        num_threads=settings.threads,
        adapters=_adapter_paths(settings),
    )
    info = runner.info
    grammars = backend_for(checkpoint.name, info.vocab_size, info.eos_token_ids)
    backend = f"{info.device}, {info.dtype}, attention {info.backend}"
    shape = _shape(checkpoint.config, info, settings.block_size)
    return _Parts(config, runner, backend, checkpoint.name, info.eos_token_ids, info.vocab_size, grammars, shape)


def _shape(model: "ModelConfig", info: "RunnerInfo", block_size: int) -> ModelShape:
    """The model's sizes for the arithmetic of a step, bytes as they are stored."""
    shape = ModelShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_size=model.head_size,
        vocab_size=model.vocab_size,
        weight_bytes=max(1, round(info.weight_bytes / info.num_parameters)),
        kv_bytes=1,
        block_size=block_size,
    )
    return msgspec.structs.replace(shape, kv_bytes=info.bytes_per_block // (shape.kv_bytes_per_token * block_size))
