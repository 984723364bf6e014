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
        self.config: dict[str, Any] = _read_json(path / "config.json")
        self._files: dict[str, Any] = {}
        self._where = self._locate()

    def read(self, name: str) -> torch.Tensor:
        """One tensor as stored. Raises `ConfigError` if it is missing or its file is damaged."""
        if name not in self._where:
            raise ConfigError(f"{self.path} lacks the tensor {name}")
        try:
            tensor: torch.Tensor = self._open(self._where[name]).get_tensor(name)
        except SafetensorError as error:
            raise ConfigError(f"{self.path}: tensor {name} in {self._where[name]} can't be read ({error})") from None
        if not tensor.is_floating_point():
            raise ConfigError(f"{self.path}: tensor {name} is of type {tensor.dtype}; quantised files aren't supported")
        return tensor

    def has(self, name: str) -> bool:
        """Whether the folder holds it."""
        return name in self._where

    def _locate(self) -> dict[str, str]:
        if (self.path / INDEX).is_file():
            where: dict[str, str] = _read_json(self.path / INDEX).get("weight_map", {})
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
            try:
                self._files[file] = safe_open(self.path / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{self.path / file} can't be read ({error}): truncated? get it anew") from None
        return self._files[file]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read ({error})") from None
    return content
