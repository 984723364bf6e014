"""Sampling in the whole engine, on a tiny random model: seeds, drafts, grammars, log-probabilities."""

import threading
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.knobs import Knobs
from schedtop.engine.runner.model_runner import ModelRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sched.output import ModelRunnerOutput, SchedulerOutput

NUM_TOKENS = 40
VOCAB = 40
"""Few tokens, so that n-gram drafts are often found and sometimes right."""


@pytest.fixture(scope="module")
def peer() -> Any:
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.25,
        eos_token_id=2,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def path(peer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    peer.save_pretrained(folder)
    return folder


@dataclass
class Recorder:
    """Keeps what the runner reported."""

    runner: ModelRunner
    outputs: list[ModelRunnerOutput] = field(default_factory=list)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self.outputs.append(self.runner.execute_model(scheduler_output))
        return self.outputs[-1]

    def shutdown(self) -> None:
        self.runner.shutdown()


PROMPTS = [[5, 9, 5, 9, 5, 9, 5], [7, 8, 9, 10, 11] * 4, [3], list(range(3, 40))]


def run(
    path: Path, settings: Sequence[SamplingParams], config: dict | None = None, **knobs: Any
) -> tuple[list[list[int]], Recorder, EngineCore]:
    engine = EngineConfig(**{"num_kv_blocks": 60, "max_model_len": 128, **(config or {})})
    recorder = Recorder(ModelRunner(str(path), engine, dtype="fp32"))
    core = EngineCore(engine, recorder, Knobs(**knobs))
    texts: list[list[int]] = [[] for _ in settings]
    for index, sampling in enumerate(settings):
        core.add_request(str(index), PROMPTS[index % len(PROMPTS)], sampling)
    while core.has_work:
        result = core.step()
        for output in result.outputs if result else []:
            texts[int(output.request_id)] += output.new_token_ids
    core.shutdown()
    return texts, recorder, core


def sampled(seed: int, **settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": seed, **settings})


MIXED = [
    sampled(1, temperature=0.6),
    sampled(2, top_k=5),
    sampled(3, top_p=0.7, repetition_penalty=1.2),
    sampled(4, min_p=0.05, presence_penalty=0.4, bad_words_ids=((9, 10), (12,))),
]


@pytest.fixture(scope="module")
def alone(path: Path) -> list[list[int]]:
    """Each request by itself: the text that its seed gives."""
    texts = []
    for index, sampling in enumerate(MIXED):
        filler = [SamplingParams(max_tokens=1)] * index
        texts.append(run(path, [*filler, sampling], max_num_seqs=1)[0][index])
    return texts


@pytest.mark.parametrize(
    ("config", "knobs"),
    [
        ({}, {}),
        ({}, {"max_num_batched_tokens": 6, "max_num_seqs": 4}),
        ({"num_kv_blocks": 11}, {}),
        ({}, {"async_scheduling": True}),
        ({"max_num_speculative_tokens": 3}, {"num_speculative_tokens": 3}),
        ({"max_num_speculative_tokens": 3}, {"num_speculative_tokens": 3, "async_scheduling": True}),
    ],
    ids=["batch", "chunks", "preemptions", "async", "drafts", "drafts, async"],
)
def test_a_seed_gives_the_same_text_whatever_the_schedule(
    path: Path, alone: list[list[int]], config: dict, knobs: dict
) -> None:
    texts, _, core = run(path, MIXED, config, **knobs)
    assert texts == alone
    assert core.scheduler.stats.preemptions > 0 or config.get("num_kv_blocks") != 11
    assert core.scheduler.stats.accepted_tokens > 0 or "num_speculative_tokens" not in knobs


def test_without_a_seed_two_texts_differ(path: Path) -> None:
    free = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    texts, _, _ = run(path, [free] * 8)
    assert texts[0] != texts[4]


def test_drafts_leave_the_distribution_as_it_is(path: Path, peer: Any) -> None:
    """First tokens behind the prompt, drafted by the n-gram lookup, against the model's own probabilities."""
    num_requests = 600
    settings = [sampled(seed, max_tokens=3, temperature=1.0) for seed in range(num_requests)]
    texts, _, core = run(
        path,
        settings,
        {"max_num_speculative_tokens": 2, "num_kv_blocks": 900},
        num_speculative_tokens=2,
    )
    assert core.scheduler.stats.draft_tokens > 0
    for number, prompt in enumerate(PROMPTS[:2]):
        mine = [text for index, text in enumerate(texts) if index % len(PROMPTS) == number]
        first = max({text[0] for text in mine}, key=lambda token: sum(text[0] == token for text in mine))
        seconds = [text[1] for text in mine if text[0] == first]
        with torch.inference_mode():
            chances = peer(input_ids=torch.tensor([[*prompt, first]])).logits[0, -1].softmax(0).tolist()
        large = [token for token in range(VOCAB) if chances[token] * len(seconds) >= 5]
        chi_squared = sum(
            (seconds.count(token) - len(seconds) * chances[token]) ** 2 / (len(seconds) * chances[token])
            for token in large
        )
        assert chi_squared < 3 * len(large) + 12  # far beyond chance; the seeds are fixed


@pytest.mark.parametrize("chunk", [2048, 5])
def test_prompt_logprobs_equal_those_of_transformers(path: Path, peer: Any, chunk: int) -> None:
    wanted = [SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=3)] * len(PROMPTS)
    _, recorder, _ = run(path, wanted, max_num_batched_tokens=chunk, max_num_seqs=4)
    found = {req_id: entries for output in recorder.outputs for req_id, entries in output.prompt_logprobs.items()}
    assert len(found) == len(PROMPTS)
    for index, prompt in enumerate(PROMPTS):
        entries = found[str(index)]
        assert len(entries) == len(prompt) and entries[0] is None
        with torch.inference_mode():
            expected = peer(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
        for position, entry in enumerate(entries[1:]):
            assert entry is not None and entry[0][0] == prompt[position + 1]
            assert {token for token, _ in entry} >= set(expected[position].topk(3).indices.tolist())
            for token, logprob in entry:
                assert logprob == pytest.approx(float(expected[position, token]), abs=1e-4)


def test_output_logprobs_equal_those_of_transformers_with_and_without_drafts(path: Path, peer: Any) -> None:
    wanted = [SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=2)] * 2
    for drafts in (0, 3):
        texts, recorder, _ = run(path, wanted, {"max_num_speculative_tokens": drafts}, num_speculative_tokens=drafts)
        entries: dict[str, list] = {}
        for output in recorder.outputs:
            for req_id, part in output.logprobs.items():
                entries.setdefault(req_id, []).extend(part)
        for index, text in enumerate(texts):
            with torch.inference_mode():
                logits = peer(input_ids=torch.tensor([PROMPTS[index] + text])).logits[0]
            expected = logits.log_softmax(-1)[len(PROMPTS[index]) - 1 :]
            for place, token in enumerate(text):
                own = entries[str(index)][place][0]
                assert own == (token, pytest.approx(float(expected[place, token]), abs=1e-4))


class EveryThird:
    """A grammar whose n-th token must leave the rest n % 3 when divided by 3."""

    def __init__(self) -> None:
        self.num_accepted = 0
        self.is_finished = False

    def new_state(self) -> "EveryThird":
        return EveryThird()

    def fill_bitmask(self, words: MutableSequence[int]) -> None:
        for token in range(self.num_accepted % 3, VOCAB, 3):
            words[token // 32] |= torch.tensor(1 << token % 32, dtype=torch.int64).to(torch.int32).item()

    def accept(self, token_id: int) -> bool:
        if token_id % 3 != self.num_accepted % 3:
            return False
        self.num_accepted += 1
        return True


class Grammars:
    def compile(self, schema: str) -> EveryThird:
        return EveryThird()


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_grammar_holds_with_drafts_steps_ahead_and_preemptions(path: Path, drafts: int, is_async: bool) -> None:
    config = EngineConfig(num_kv_blocks=10, max_model_len=128, max_num_speculative_tokens=drafts)
    core = EngineCore(
        config,
        ModelRunner(str(path), config, dtype="fp32"),
        Knobs(num_speculative_tokens=drafts, async_scheduling=is_async),
        grammar_backend=Grammars(),
    )
    compiled = threading.Event()
    core.on_mail = compiled.set
    texts: list[list[int]] = [[], [], []]
    for index in range(3):
        core.add_request(str(index), PROMPTS[index], sampled(index, grammar="{}", temperature=0.5))
    num_running = 3
    while num_running:
        if not core.has_work:
            assert compiled.wait(30)
            compiled.clear()
        result = core.step()
        for output in result.outputs if result else []:
            assert not output.detail
            texts[int(output.request_id)] += output.new_token_ids
            num_running -= output.finish_reason is not None
    core.shutdown()
    for text in texts:
        assert len(text) == NUM_TOKENS
        assert all(token % 3 == place % 3 for place, token in enumerate(text))
