"""The tokenizer rebuilt from GGUF metadata against ids from llama.cpp, and what the gateway relies on."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers

from schedtop.engine.errors import ConfigError
from schedtop.engine.runner.tokenizer import Tokenizer, load_tokenizer

CORPUS = json.loads((Path(__file__).parent / "data" / "smollm2-tokens.json").read_text(encoding="utf-8"))
pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("smollm2")


@pytest.mark.parametrize("entry", CORPUS, ids=range(len(CORPUS)))
def test_ids_equal_the_reference(tokenizer: Tokenizer, entry: dict) -> None:
    assert tokenizer.encode(entry["text"]) == entry["ids"]


@pytest.mark.parametrize("entry", CORPUS, ids=range(len(CORPUS)))
def test_bytes_of_tokens_make_up_the_text_again(tokenizer: Tokenizer, entry: dict) -> None:
    assert b"".join(map(tokenizer.token_bytes, entry["ids"])).decode() == entry["text"]


def test_a_written_tokenizer_gives_the_same_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.write(tmp_path / "tokenizer.json")
    read = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for entry in CORPUS:
        assert read.encode(entry["text"], add_special_tokens=False).ids == entry["ids"]


def test_chat_template_writes_the_turns_and_opens_the_answer(tokenizer: Tokenizer) -> None:
    text = tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]), skip_special=False)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_special_tokens_are_told_apart_and_end_answers(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_token_ids == (0, 2)
    assert tokenizer.is_special(2) and not tokenizer.is_special(19556)
    assert tokenizer.decode([19556, 2]) == "Hello"
    assert tokenizer.token_bytes(1 << 20) == b""


def test_a_template_that_fails_is_a_value_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="refuses these messages"):
        tokenizer.apply_chat_template([{"content": "a turn without a role"}])


def test_loading_a_tokenizer_imports_no_torch() -> None:
    code = (
        "import sys; from schedtop.engine.runner.tokenizer import load_tokenizer; load_tokenizer('smollm2'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


def test_a_name_that_leads_nowhere_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"no model at \./nowhere"):
        load_tokenizer("./nowhere")
