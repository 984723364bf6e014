"""KV stores and structured output with the real SmolLM2: other code than the fake runner's, the same promises."""

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import redis
import torch
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.knobs import initial_knobs
from schedtop.engine.kv.connector.attach import attach_store, open_store
from schedtop.engine.runner.grammar_xgrammar import XGrammarBackend, backend_for
from schedtop.engine.runner.loader.checkpoint import Checkpoint, open_checkpoint
from schedtop.engine.runner.model_runner import ModelRunner
from schedtop.engine.runner.tokenizer import Tokenizer, load_tokenizer
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.snapshot import FinishReason, Viewport

pytestmark = pytest.mark.model

TEXT = "The history of the city begins in the ninth century, when fishermen settled at the mouth of the river. " * 4
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"type": "string", "maxLength": 20},
        "population": {"type": "integer", "minimum": 0, "maximum": 99999999},
        "is_capital": {"type": "boolean"},
    },
    "required": ["city", "country", "population", "is_capital"],
    "additionalProperties": False,
}


class SharedCheckpoint(Checkpoint):
    """Reads each weight once for all engines of these tests."""

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner.name, inner.config, inner._source)
        self._taken: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        if name not in self._taken:
            self._taken[name] = super().take(name, shape)
        return self._taken[name]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return SharedCheckpoint(open_checkpoint("smollm2"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("smollm2")


@pytest.fixture(scope="module")
def backend(checkpoint: Checkpoint) -> XGrammarBackend:
    backend = backend_for("smollm2", checkpoint.config.vocab_size, checkpoint.config.eos_token_ids)
    assert backend is not None, "these tests need xgrammar: install schedtop[engine,dev]"
    backend.compile("{}")  # the library is there from now on
    return backend


class Engine:
    """The real runner under an engine core. Waits for background work on the core's own wake-up call."""

    def __init__(self, checkpoint: Checkpoint, *, is_async: bool = False, backend: Any = None, drafts: int = 0) -> None:
        config = EngineConfig(
            num_kv_blocks=257,
            max_model_len=1024,
            max_num_batched_tokens=96,
            max_num_seqs=8,
            max_num_speculative_tokens=drafts,
        )
        self.runner = ModelRunner(checkpoint, config, dtype="fp32", num_threads=1)
        self.core = EngineCore(
            config,
            self.runner,
            initial_knobs(config, async_scheduling=is_async),
            eos_token_ids=checkpoint.config.eos_token_ids,
            grammar_backend=backend,
        )
        self.has_mail = threading.Event()
        self.core.on_mail = self.has_mail.set
        self.num_computed = 0
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, tuple[FinishReason, str]] = {}

    def add(self, request_id: str, tokens: list[int], **sampling: Any) -> None:
        self.core.add_request(request_id, tokens, SamplingParams(**{"temperature": 0.0, **sampling}))

    def step(self) -> None:
        done = self.core.step()
        for output in done.outputs if done else ():
            self.outputs.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] = (output.finish_reason, output.detail)

    def run(self) -> dict[str, list[int]]:
        while self.core.scheduler.requests or self.core.has_work:
            self.has_mail.clear()
            if self.core.has_work:
                self.step()
            else:
                assert self.has_mail.wait(60), "nothing came back from the background"
        assert self.core.self_check() == []
        return self.outputs

    def close(self) -> int:
        """Tokens computed."""
        self.core.shutdown()
        return self.core.snapshot(Viewport()).counters.computed_tokens


@pytest.fixture(params=["folder", "redis"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "folder":
        yield f"folder:{tmp_path}"
        return
    binary = shutil.which("redis-server")
    assert binary is not None, "this test needs redis-server: install the Debian package redis-server"
    command = [binary, "--port", "0", "--unixsocket", str(tmp_path / "r.sock"), "--save", "", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        url = f"unix://{tmp_path / 'r.sock'}"
        with redis.Redis.from_url(url, retry=Retry(ConstantBackoff(0.05), 200)) as client:
            client.ping()
        yield url
        process.terminate()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_second_engine_starts_a_known_prompt_from_the_first_ones_blocks(
    checkpoint: Checkpoint, tokenizer: Tokenizer, store_url: str, is_async: bool
) -> None:
    prompts = {name: tokenizer.encode(f"{TEXT} {name}") for name in ("And then", "But soon")}
    outputs, computed = [], []
    for _ in range(2):
        engine = Engine(checkpoint, is_async=is_async)
        attach_store(engine.core, engine.runner, open_store(store_url, engine.runner.memory.format("smollm2")))
        for name, prompt in prompts.items():
            engine.add(name, prompt, max_tokens=16)
        outputs.append(engine.run())
        computed.append(engine.close())
    assert outputs[0] == outputs[1]
    assert computed[0] - computed[1] >= (len(prompts["And then"]) - 1) // 16 * 16


def test_an_engine_that_only_prefills_feeds_one_that_decodes(
    checkpoint: Checkpoint, tokenizer: Tokenizer, store_url: str
) -> None:
    prompt = tokenizer.encode(TEXT)
    alone = Engine(checkpoint)
    alone.add("r", prompt, max_tokens=12)
    expected = alone.run()["r"]
    alone.close()
    prefills, decodes = Engine(checkpoint), Engine(checkpoint)
    for engine in (prefills, decodes):
        store = open_store(store_url, engine.runner.memory.format("smollm2"))
        attach_store(engine.core, engine.runner, store)
    prefills.add("r", prompt, max_tokens=1)
    prefills.run()
    prefills.close()
    decodes.add("r", prompt, max_tokens=12)
    assert decodes.run()["r"] == expected
    assert decodes.close() == len(prompt) - (len(prompt) - 1) // 16 * 16 + 11


# ---- structured output -------------------------------------------------------------------------------------------


def ask(tokenizer: Tokenizer, question: str) -> list[int]:
    return tokenizer.apply_chat_template([{"role": "user", "content": question}])


def check_city(text: str) -> None:
    city = json.loads(text)
    assert set(city) == set(SCHEMA["properties"])  # type: ignore[arg-type]
    assert isinstance(city["city"], str) and len(city["city"]) <= 20
    assert isinstance(city["country"], str) and len(city["country"]) <= 20
    assert isinstance(city["population"], int) and 0 <= city["population"] <= 99999999
    assert isinstance(city["is_capital"], bool)


@pytest.mark.parametrize(("is_async", "drafts"), [(False, 0), (False, 3), (True, 0), (True, 3)])
def test_the_answer_is_always_json_of_the_schema(
    checkpoint: Checkpoint, tokenizer: Tokenizer, backend: XGrammarBackend, is_async: bool, drafts: int
) -> None:
    engine = Engine(checkpoint, is_async=is_async, backend=backend, drafts=drafts)
    schema = json.dumps(SCHEMA)
    for index, city in enumerate(["Paris", "Rome", "Tokyo"]):
        prompt = ask(tokenizer, f"Describe {city} as JSON.")
        settings = {"temperature": 1.0, "seed": index} if index else {}
        engine.add(city, prompt, max_tokens=200, grammar=schema, **settings)
    engine.add("plain", ask(tokenizer, "What is the capital of France?"), max_tokens=8)
    engine.run()
    for city in ("Paris", "Rome", "Tokyo"):
        assert engine.ends[city] == (FinishReason.STOP, "")
        check_city(tokenizer.decode(engine.outputs[city]))
    assert "Paris" in tokenizer.decode(engine.outputs["plain"])
    engine.close()


def test_a_preempted_answer_goes_on_where_its_json_stood(
    checkpoint: Checkpoint, tokenizer: Tokenizer, backend: XGrammarBackend
) -> None:
    texts = []
    for is_preempted in (False, True):
        engine = Engine(checkpoint, backend=backend)
        engine.add("r", ask(tokenizer, "Describe Oslo as JSON."), max_tokens=200, grammar=json.dumps(SCHEMA))
        while len(engine.outputs.get("r", [])) < 10:
            engine.has_mail.clear()
            if engine.core.has_work:
                engine.step()
            else:
                assert engine.has_mail.wait(60)
        if is_preempted:
            engine.core.preempt(["r"])
        engine.run()
        texts.append(tokenizer.decode(engine.outputs["r"]))
        engine.close()
    check_city(texts[0])
    assert texts[0] == texts[1]


def test_min_tokens_beyond_the_end_of_the_json_cant_break_it(
    checkpoint: Checkpoint, tokenizer: Tokenizer, backend: XGrammarBackend
) -> None:
    engine = Engine(checkpoint, backend=backend)
    schema = json.dumps({"type": "boolean"})
    engine.add("r", ask(tokenizer, "Is it so?"), max_tokens=20, min_tokens=15, grammar=schema)
    engine.run()
    assert json.loads(tokenizer.decode(engine.outputs["r"])) in (True, False)
    engine.close()


@pytest.mark.parametrize("bad", ["{", '{"type": "nonsense"}', "5"])
def test_a_bad_schema_is_told_in_words(backend: XGrammarBackend, bad: str) -> None:
    with pytest.raises(ValueError, match=r"not a JSON schema that can be followed: [^\[]"):
        backend.compile(bad)
