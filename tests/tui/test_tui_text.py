"""Generated text in a request's details."""

import threading

from schedtop.control.messages import EngineInfo
from schedtop.tui.text import TextReader, load_decoder

INFO = EngineInfo(name="e", model="m", boot_id="b", pid=1, version="1", model_path="/model")


def test_text_appears_once_its_tokenizer_is_loaded_and_a_paint_never_waits_for_it() -> None:
    may_load, has_loaded = threading.Event(), threading.Event()

    def load(model_path: str):
        may_load.wait(10)
        threading.Timer(0, has_loaded.set).start()
        return lambda token_ids: " ".join(map(str, token_ids))

    reader = TextReader(load)
    assert reader.text(INFO, [1, 2]) == ""
    may_load.set()
    assert has_loaded.wait(10)
    for thread in threading.enumerate():
        if thread.name == "tokenizer":
            thread.join(10)
    assert reader.text(INFO, [1, 2]) == "1 2"


def test_a_model_without_a_readable_tokenizer_has_no_text(tmp_path) -> None:
    assert load_decoder(str(tmp_path / "nothing.gguf")) is None
    reader = TextReader(lambda model_path: None)
    assert reader.text(INFO, [1]) == ""
    assert reader.text(EngineInfo(name="e", model="m", boot_id="b", pid=1, version="1"), [1]) == ""
