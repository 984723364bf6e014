"""Tokenizers of the other families, rebuilt from GGUF metadata or read from a folder, against their peers.

Vocabularies are trained here on a few lines; the peers are SentencePiece itself and transformers' own classes.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Core
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from schedtop.engine.errors import ConfigError
from schedtop.engine.runner.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    entry["text"] for entry in json.loads((Path(__file__).parent / "data" / "smollm2-tokens.json").read_text("utf-8"))
]
PROSE = Path(__file__).read_text("utf-8").splitlines() + TEXTS
SPECIAL = ["<|start|>", "<|end|>"]
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6


def write_gguf(path: Path, kind: str, tokens: Sequence[str], types: Sequence[int], **more: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---- SentencePiece: Llama 2, Mistral --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    prefix = tmp_path_factory.mktemp("spm") / "tiny"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(PROSE),
        model_prefix=str(prefix),
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        character_coverage=0.98,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")


@pytest.fixture(scope="module")
def rebuilt(pieces: sentencepiece.SentencePieceProcessor, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    count = pieces.vocab_size()
    types = [
        UNKNOWN if pieces.is_unknown(i) else CONTROL if pieces.is_control(i) else BYTE if pieces.is_byte(i) else NORMAL
        for i in range(count)
    ]
    path = write_gguf(
        tmp_path_factory.mktemp("spm") / "tiny.gguf",
        "llama",
        [pieces.id_to_piece(i) for i in range(count)],
        types,
        token_scores=[pieces.get_score(i) for i in range(count)],
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
        chat_template="{{ bos_token }}{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}",
    )
    return load_tokenizer(str(path))


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_ids_equal_those_of_sentencepiece(
    pieces: sentencepiece.SentencePieceProcessor, rebuilt: Tokenizer, text: str
) -> None:
    assert rebuilt.encode(text) == pieces.encode(text, add_bos=True)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_of_sentencepiece_ids_is_what_went_in(
    pieces: sentencepiece.SentencePieceProcessor, rebuilt: Tokenizer, text: str
) -> None:
    """Behind the space that every text gets in front."""
    assert rebuilt.decode(pieces.encode(text)) == (f" {text}" if text else "")


def test_a_chat_begins_with_one_bos_and_no_other(
    pieces: sentencepiece.SentencePieceProcessor, rebuilt: Tokenizer
) -> None:
    ids = rebuilt.apply_chat_template([{"role": "user", "content": "digits 42"}])
    assert ids == [1, *pieces.encode("[INST] digits 42 [/INST]")]
    assert rebuilt.eos_token_ids == (2,) and rebuilt.is_special(2)


# ---- byte-level BPE: Llama 3, Qwen 2 and 3 --------------------------------------------------------------------------


def train(split: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [*PROSE, *[" 2026 unreach"] * 9],
        trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False, min_frequency=2),
    )
    model = json.loads(core.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


class Llama3(TikTokenConverter):
    """transformers' converter of Llama 3's tokenizer, given a vocabulary."""

    def __init__(self, vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
        super().__init__(extra_special_tokens=SPECIAL)
        self.trained = vocab, merges

    def extract_vocab_merges_from_model(self, tiktoken_url: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
        return self.trained


def peer_of(name: str) -> tuple[Any, dict[str, int], list[tuple[str, str]]]:
    """transformers' tokenizer, its vocabulary and its merges."""
    words = r"\s?\w+|[^\w]"  # unlike either family's rule, so that the rules themselves make a difference
    vocab, merges = train(words)
    # a token that no merges lead to: only whole words of it are found, and only by Llama 3's rule
    vocab = {**vocab, "Ġunreachable": len(vocab)}
    if name == "llama-bpe":
        return PreTrainedTokenizerFast(tokenizer_object=Llama3(vocab, merges).converted()), vocab, merges
    peer = Qwen2Tokenizer(vocab=vocab, merges=merges, unk_token=None, eos_token=SPECIAL[1], pad_token=SPECIAL[1])
    peer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return peer, vocab, merges


@pytest.fixture(scope="module", params=["llama-bpe", "qwen2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    peer, _, merges = peer_of(request.param)
    tokens = peer.convert_ids_to_tokens(range(len(peer)))
    path = write_gguf(
        tmp_path_factory.mktemp("bpe") / "tiny.gguf",
        "gpt2",
        tokens,
        [CONTROL if token in SPECIAL else NORMAL for token in tokens],
        tokenizer_pre=request.param,
        token_merges=[" ".join(merge) for merge in merges],
        eos_token_id=tokens.index(SPECIAL[1]),
    )
    return peer, load_tokenizer(str(path))


MORE = [" unreachable", "2026 12 345", "e\u0301te\u0301 n\u0303", "x\n\n  y\r\n", "it's WE'LL 'Ve", f"a{SPECIAL[0]}b"]


def test_ids_and_bytes_equal_those_of_transformers(pair: tuple[Any, Tokenizer]) -> None:
    peer, mine = pair
    for text in TEXTS + MORE:
        ids = peer.encode(text, add_special_tokens=False)
        assert mine.encode(text) == ids, text
        assert mine.decode(ids, skip_special=False) == peer.decode(ids, skip_special_tokens=False), text


def test_the_two_families_cut_differently() -> None:
    """Else the test above could not tell them apart."""
    llama, qwen = peer_of("llama-bpe")[0], peer_of("qwen2")[0]
    for text in (" unreachable", "2026", "e\u0301te\u0301"):
        assert llama.encode(text, add_special_tokens=False) != qwen.encode(text, add_special_tokens=False)


TEMPLATES = {
    "turns": "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}",
    "marked for training": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.role }}: {{ m.content }}{% endif %}{% if loop.last %}{% break %}{% endif %}\n"
    "{% endfor %}",
    "tools and dates": "{{ strftime_now('%Y') is string }} {{ messages | tojson(indent=2) }} {{ tools is none }} "
    "{{ eos_token }}{%- set ns = namespace(n=0) %}{% for m in messages %}"
    "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
}
TALK = [
    {"role": "user", "content": "  Größe <b>& 日本</b>?"},
    {"role": "assistant", "content": "42."},
    {"role": "user", "content": "Thanks"},
]


@pytest.mark.parametrize("what", TEMPLATES)
def test_a_folders_tokenizer_and_chat_template_equal_those_of_transformers(tmp_path: Path, what: str) -> None:
    peer = peer_of("qwen2")[0]
    peer.chat_template = TEMPLATES[what]
    peer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    mine = load_tokenizer(str(tmp_path))
    assert all(mine.encode(text) == peer.encode(text) for text in TEXTS)
    for opens in (True, False):
        expected = peer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=opens)
        assert mine.render_chat(TALK, add_generation_prompt=opens) == expected
        ids = peer.apply_chat_template(TALK, add_generation_prompt=opens, return_dict=False)
        assert mine.apply_chat_template(TALK, add_generation_prompt=opens) == ids
    assert mine.eos_token_ids == (peer.eos_token_id,)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"tokenizer_pre": "mystery", "token_merges": ["a b"]}, "pre=mystery is not supported; known are gpt-2"),
        ({}, "lacks the metadata tokenizer.ggml.merges"),
    ],
)
def test_a_tokenizer_that_cannot_be_rebuilt_is_refused(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    path = write_gguf(tmp_path / "t.gguf", "gpt2", ["a", "b", "ab"], [NORMAL] * 3, **more)
    with pytest.raises(ConfigError, match=words):
        load_tokenizer(str(path))
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.model=bert is not supported; gpt2 and llama are"):
        load_tokenizer(str(write_gguf(tmp_path / "b.gguf", "bert", ["a"], [NORMAL])))
