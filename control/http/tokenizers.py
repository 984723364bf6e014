"""Finds the tokenizer of the engine's model. The gateway runs without torch: so must whatever is imported here."""

from schedtop.control.http.byte_tokenizer import ByteTokenizer
from schedtop.control.http.text import Tokenizer
from schedtop.control.messages import EngineInfo


def load_tokenizer(info: EngineInfo) -> Tokenizer:
    """The tokenizer at `info.model_path`; bytes for an engine without a model. Raises `ConfigError`."""
    if not info.model_path:
        return ByteTokenizer()
    from schedtop.engine.runner import tokenizer

    return tokenizer.load_tokenizer(info.model_path)
