"""A name for a model's weights that says what they are, not where they lie: for KV that outlives its engine."""

from hashlib import blake2b, file_digest
from pathlib import Path


def fingerprint(path: Path) -> str:
    """Hash of a GGUF file, or of the settings and weights in a model folder; reads them whole, about 1 s per GB."""
    state = blake2b(digest_size=16)
    for file in [path] if path.is_file() else sorted([path / "config.json", *path.glob("*.safetensors")]):
        with file.open("rb") as content:
            state.update(file_digest(content, "blake2b").digest())
    return state.hexdigest()
