"""What `schedtop serve` is started with: one strict struct, from a TOML file and the command line.

Only names, types and their checks; what is built from them is in `serve.py`.
"""

import difflib
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from schedtop.engine.errors import ConfigError
from schedtop.engine.knobs import KnobValue

_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(B|kB|KB|MB|GB|TB|KiB|MiB|GiB|TiB)?", re.IGNORECASE)
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raises `ConfigError` for values that make no sense by themselves."""

    name: str = "schedtop"
    """Engine name: the socket's file name and the label in metrics."""
    runner: Literal["real", "fake", "simulated"] = "real"
    """real: a model; fake: tokens are hashes of their prefix; simulated: a modelled step time, no tokens to read."""
    model: str = "smollm2"
    """GGUF file, model folder, hub id, or the built-in model `smollm2`."""
    served_model_name: str | None = None
    """Name of the model towards clients; default: the last part of `model`."""
    dtype: str = "auto"
    """Precision of weights and KV cache: auto, fp32, fp16, bf16."""
    device: str = "auto"
    """auto, cpu or cuda."""
    attention: str = "auto"
    """Attention backend; auto picks the best one that works here."""
    lora: dict[str, str] = {}
    """LoRA adapters: the name that requests use as their model -> a folder in PEFT's format."""
    max_adapters: int | None = None
    """Different adapters that may run at once; default: all of them."""
    threads: int | None = None
    """CPU threads of the model; default: all cores."""
    wait_policy: Literal["auto", "active", "passive"] = "auto"
    """What idle CPU threads do between products: active = spin, for a machine of one's own; passive = sleep, for a
    shared one; auto = as OMP_WAIT_POLICY and GOMP_SPINCOUNT say, or OpenMP's default."""

    block_size: int = 16
    """Tokens per KV block."""
    num_kv_blocks: int | None = None
    """KV blocks to allocate; default: what fits kv_memory (1000 without a model)."""
    kv_memory: str | None = None
    """Memory for the KV cache, such as 4GB; default: 512MiB."""
    max_model_len: int | None = None
    """Longest context in tokens; default: the model's, as far as the pool holds it."""
    max_num_batched_tokens: int = 2048
    """Ceiling of the token budget of one step."""
    max_num_seqs: int = 64
    """Ceiling of the number of running requests."""
    max_num_speculative_tokens: int = 0
    """Ceiling of the draft tokens per request and step."""
    kv_store: str | None = None
    """Where engines share KV blocks: folder:PATH, redis://host:port/db or unix:///socket; default: nowhere."""
    kv_namespace: str = ""
    """Keeps engines apart that use one store and shouldn't share."""
    scheduler_cls: str | None = None
    """Another scheduler, as module:Class; default: ours."""
    knobs: dict[str, KnobValue] = {}
    """Start values of live knobs."""

    socket: str | None = None
    """Control socket; default: NAME.sock in the runtime folder."""
    audit: str | None = None
    """Audit log; default: NAME.audit.sqlite in the state folder."""
    gateway: bool = True
    """Also run the HTTP gateway."""
    host: str = "127.0.0.1"
    """Address of the gateway."""
    port: int = 8000
    """Port of the gateway; 0 = any free one."""
    token_file: str | None = None
    """Tokens of the gateway (TOML)."""
    allowed_hosts: list[str] = []
    """Further names by which clients may address the gateway."""
    playbooks: str | None = None
    """Folder of playbooks that clients of the gateway may start by name, besides the shipped ones."""
    drain: float = 30.0
    """Seconds that running requests get to finish at the end."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                f"name={self.name!r} can't be a file name: use letters, digits, dots, dashes (64 at most)"
            )
        for field, low, high in (("port", 0, 65535), ("drain", 0, 86400), ("threads", 1, 4096)):
            value = getattr(self, field)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{field}={value} is outside its range {low} to {high}")
        for name in self.lora:
            if not name or not name.isprintable() or name == (self.served_model_name or Path(self.model).stem):
                raise ConfigError(f"lora={name!r} can't name an adapter: use a printable name that isn't the model's")
        if (self.lora or self.max_adapters) and self.runner != "real":
            raise ConfigError(f"adapters need a model: a {self.runner} runner has no weights")
        if self.max_adapters is not None and not 0 < self.max_adapters <= len(self.lora):
            raise ConfigError(f"max_adapters={self.max_adapters} is outside its range 1 to {len(self.lora)} (lora)")
        if self.kv_memory is not None:
            parse_memory(self.kv_memory)
            if self.num_kv_blocks is not None:
                raise ConfigError("num_kv_blocks and kv_memory both size the KV cache: give one of them")


def parse_memory(text: str) -> int:
    """Bytes of `512MiB`, `4 GB`, `1000000`. Raises `ConfigError`.

    >>> parse_memory("1.5KiB")
    1536
    """
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{text!r} is no amount of memory: write 512MiB, 4GB or a number of bytes")
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


def load_settings(path: Path | None, overrides: dict[str, Any]) -> ServeSettings:
    """The file's settings (if there is one) with `overrides` on top. Raises `ConfigError` naming what is wrong."""
    values = _read(path) if path is not None else {}
    known = ServeSettings.__struct_fields__
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
            raise ConfigError(f"{path}: no setting is called {key!r}; {hint}")
    merged = {key: {**values.get(key, {}), **overrides.get(key, {})} for key in ("knobs", "lora")}
    try:
        return msgspec.convert({**values, **overrides, **merged}, ServeSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path or 'command line'}: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} isn't TOML: {error}") from None
