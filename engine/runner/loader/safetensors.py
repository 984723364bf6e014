"""Hugging Face folders: `config.json` and safetensors, in one file or in shards with an index."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from schedtop.engine.errors import ConfigError

INDEX = "model.safetensors.index.json"


class SafetensorsFolder:
    """Finds each tensor's file; opens a file when its first tensor is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config: dict[str, Any] = read_json(path / "config.json")
        self._files: dict[str, Any] = {}
        self._where = self._locate()

    def read(self, name: str) -> torch.Tensor:
        """One tensor as stored. Raises `ConfigError` if it is missing or its file is damaged."""
        if name not in self._where:
            raise ConfigError(f"{self.path} lacks the tensor {name}")
        return read_tensor(self._open(self._where[name]), name, str(self.path / self._where[name]))

    def has(self, name: str) -> bool:
        """Whether the folder holds it."""
        return name in self._where

    def _locate(self) -> dict[str, str]:
        if (self.path / INDEX).is_file():
            where: dict[str, str] = read_json(self.path / INDEX).get("weight_map", {})
            for file in sorted(set(where.values())):
                if not (self.path / file).is_file():
                    raise ConfigError(f"{self.path} lacks the shard {file} that {INDEX} lists")
            return where
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{self.path} has no .safetensors file: convert the weights, pickles aren't loaded")
        return {name: file.name for file in files for name in self._open(file.name).keys()}  # noqa: SIM118

    def _open(self, file: str) -> Any:
        if file not in self._files:
            self._files[file] = open_safetensors(self.path / file)
        return self._files[file]


def open_safetensors(path: Path) -> Any:
    """One file, opened. Raises `ConfigError` when it is damaged."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} can't be read ({error}): truncated? get it anew") from None


def read_tensor(file: Any, name: str, where: str) -> torch.Tensor:
    """One tensor of an opened file, as stored. Raises `ConfigError` naming it and `where` if it can't be used."""
    try:
        tensor: torch.Tensor = file.get_tensor(name)
    except SafetensorError as error:
        raise ConfigError(f"{where}: tensor {name} can't be read ({error})") from None
    if not tensor.is_floating_point():
        raise ConfigError(f"{where}: tensor {name} is of type {tensor.dtype}; quantised files aren't supported")
    return tensor


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises `ConfigError` naming the file."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read ({error})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} can't be read: it isn't a JSON object")
    return content
