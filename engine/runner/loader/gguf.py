"""GGUF files through the `gguf` library: metadata as plain values, tensors as dequantised numpy arrays. Torch-free.

What the values mean for a model is in `checkpoint.py`, what they mean for a tokenizer in `tokenizer.py`.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from schedtop.engine.errors import ConfigError

SUPPORTED = frozenset(
    getattr(gguf.GGMLQuantizationType, name) for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K")
)


class _Reader(gguf.GGUFReader):
    """Cuts its many small pieces out of a plain array: cut out of a `memmap` each costs three times as much."""

    def _get(self, *arguments: Any, **options: Any) -> Any:
        if type(self.data) is np.memmap:
            self.data: Any = self.data.view(np.ndarray)
        return super()._get(*arguments, **options)


class GgufFile:
    """One opened GGUF file. Raises `ConfigError` naming the file when it can't be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = _Reader(path)
        except (ValueError, IndexError, KeyError, OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path} can't be read as GGUF ({error}): truncated or no GGUF file; get it anew"
            ) from None
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._check_length()

    def _check_length(self) -> None:
        size = self.path.stat().st_size
        for tensor in self._reader.tensors:
            end = int(tensor.data_offset) + int(tensor.n_bytes)
            if end > size:
                raise ConfigError(f"{self.path} is truncated: tensor {tensor.name} ends at byte {end} of {size}")

    @cached_property
    def tensor_names(self) -> list[str]:
        """Names of all tensors, as in the file."""
        return list(self._tensors)

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value, or `default`."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        """A metadata value that must be there."""
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self.path} lacks the metadata {key}: it can't be served")
        return value

    def tensor(self, name: str) -> NDArray[np.float32]:
        """One tensor in fp32, outermost dimension first."""
        found = self._tensors.get(name)
        if found is None:
            raise ConfigError(f"{self.path} lacks the tensor {name}")
        if found.tensor_type not in SUPPORTED:
            known = ", ".join(sorted(kind.name for kind in SUPPORTED))
            raise ConfigError(f"{self.path}: tensor {name} is of type {found.tensor_type.name}; supported are {known}")
        shape = tuple(int(size) for size in reversed(found.shape))
        values = gguf.dequantize(found.data, found.tensor_type).reshape(shape)
        return np.require(values, np.float32, ["C", "W"])
