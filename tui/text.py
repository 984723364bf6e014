"""Generated text for the eye: tokens decoded by the engine's own tokenizer, loaded beside the screen when first wanted.

Watching needs no tokenizer and no torch; where the tokenizer's library or file isn't there, there is simply no text.
"""

import threading
from collections.abc import Callable, Sequence

from schedtop.control.messages import EngineInfo
from schedtop.engine.errors import SchedtopError

Decode = Callable[[Sequence[int]], str]


def load_decoder(model_path: str) -> Decode | None:
    """The decoder of a model file or folder; None where it can't be had."""
    try:
        from schedtop.engine.runner.tokenizer import load_tokenizer

        return load_tokenizer(model_path).decode
    except (ImportError, OSError, SchedtopError):
        return None


class TextReader:
    """Decodes answers. The first call for a model starts loading and gives no text yet; a paint never waits."""

    def __init__(self, load: Callable[[str], Decode | None] = load_decoder) -> None:
        self._load = load
        self._decoders: dict[str, Decode | None] = {}

    def text(self, info: EngineInfo | None, token_ids: Sequence[int]) -> str:
        """The text of these tokens, as far as it can be had now."""
        if info is None or not info.model_path or not token_ids:
            return ""
        if info.model_path not in self._decoders:
            self._decoders[info.model_path] = None
            threading.Thread(target=self._fetch, args=(info.model_path,), name="tokenizer", daemon=True).start()
        decode = self._decoders[info.model_path]
        return decode(token_ids) if decode is not None else ""

    def _fetch(self, model_path: str) -> None:
        self._decoders[model_path] = self._load(model_path)
