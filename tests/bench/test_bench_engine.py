"""The engine's benchmark measures what it says: all tokens answered, time fully accounted for. Not how fast."""

import sys
from collections.abc import Sequence
from pathlib import Path

import openai_server
import pytest
import torch
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from schedtop.cli.bench_engine import report, waiting_line
from schedtop.cli.main import cli
from schedtop.control.bench_servers import HttpServer, running, schedtop_server
from schedtop.engine.runner.bench import OurEngine, Step, Transformers
from schedtop.engine.runner.bench_load import Load, Prompts, Round, alternate

THREADS = torch.get_num_threads()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        eos_token_id=2,
        pad_token_id=0,
    )
    path = tmp_path_factory.mktemp("tiny")
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    tokens = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokens |= {f"more {index}": index for index in range(len(tokens), 400)}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def ours(tiny: Path) -> OurEngine:
    return OurEngine(str(tiny), "fp32", THREADS, Load(concurrency=4, prompt_tokens=20, output_tokens=40))


class Noting:
    """A contender that notes what it is asked, in a list that it shares."""

    def __init__(self, name: str, asked: list[tuple[str, Prompts]]) -> None:
        self.name = name
        self._asked = asked

    def run(self, prompts: Prompts, output_tokens: int) -> Round:
        self._asked.append((self.name, prompts))
        return Round(tokens_per_s=1.0)


def bench(model: Path, *arguments: str) -> Result:
    base = ["bench", "engine", "--model", str(model), "--dtype", "fp32", "--threads", str(THREADS), "--rounds", "1"]
    return CliRunner().invoke(cli, [*base, "--prompt-tokens", "8", *arguments])


def test_rounds_alternate_with_the_same_prompts_and_another_first_each_time() -> None:
    asked: list[tuple[str, Prompts]] = []
    load = Load(concurrency=2, prompt_tokens=10)
    results = alternate([Noting("a", asked), Noting("b", asked)], load, 2, vocab_size=400, seed=1)
    assert [name for name, _ in asked] == ["a", "b", "a", "b", "b", "a"]
    prompts = [given for _, given in asked]
    assert prompts[0] == prompts[1] != prompts[2] == prompts[3] != prompts[4] == prompts[5]
    assert [len(rounds) for rounds in results.values()] == [2, 2]


def test_another_seed_gives_other_prompts() -> None:
    load = Load(concurrency=2, prompt_tokens=10)
    assert load.prompts(400, "1") == load.prompts(400, "1") != load.prompts(400, "2")


def test_all_time_is_accounted_for(ours: OurEngine) -> None:
    load = Load(concurrency=3, prompt_tokens=20, output_tokens=5)
    one = ours.run(load.prompts(400, "time"), 5)
    assert set(one.split) >= {"matmul", "attention", "sampling", "scheduling and bookkeeping"}
    assert sum(one.split.values()) == pytest.approx(3 * 5 / one.tokens_per_s)
    assert min(one.split.values()) >= 0.0
    assert one.num_steps == 5


def test_contenders_in_this_process_give_the_same_answers(tiny: Path, ours: OurEngine) -> None:
    prompts = Load(concurrency=3, prompt_tokens=20).prompts(400, "answers")
    answers = ours.run(prompts, 5).answers
    assert [len(answer) for answer in answers] == [5, 5, 5]
    assert list(answers) == list(Transformers(str(tiny), THREADS).run(prompts, 5).answers)


def test_steps_with_waiting_are_of_the_same_decodes_as_those_without(ours: OurEngine) -> None:
    prompts = Load(concurrency=2, prompt_tokens=20).prompts(400, "waiting")
    steps = ours.steps_with_waiting(prompts, 40, 7)
    assert set(steps) == {0, 7}
    assert len(steps[0]) == len(steps[7]) == 3 * 4
    assert all(0.0 < step.scheduling_s < step.seconds for of in steps.values() for step in of)


def test_after_steps_with_waiting_the_engine_is_as_before(ours: OurEngine) -> None:
    ours.steps_with_waiting(Load(concurrency=1, prompt_tokens=20).prompts(400, "after"), 40, 3)
    assert not ours._core.has_work and ours._core.self_check() == []
    assert ours._core.scheduler.knobs.max_num_seqs == 4


def rounds_of(speeds: Sequence[float], answer: str) -> list[Round]:
    split = {"matmul": 0.75, "attention": 0.25}
    return [Round(tokens_per_s=speed, answers=[answer], num_steps=10, split=split) for speed in speeds]


def test_report_shows_medians_the_ratio_and_how_far_answers_agree() -> None:
    peer = [Round(tokens_per_s=50.0, answers=["abcx"])] * 3
    lines = report({"ours": rounds_of((100.0, 90.0, 200.0), "abcd"), "peer": peer})
    assert "100.0 tokens/s   90.0 to 200.0" in lines[0]
    assert lines[2].strip() == "ours is 2.00 x peer; answers alike for 75%"


def test_report_splits_the_mean_step() -> None:
    lines = report({"ours": rounds_of((100.0,), "abcd")})
    assert lines[1].strip() == "its step of 100.0 ms on average: matmul 75.00 ms (75.0%), attention 25.00 ms (25.0%)"


def test_line_about_waiting_compares_medians() -> None:
    none = [Step(seconds=s, scheduling_s=0.001) for s in (0.010, 0.020, 0.5)]
    many = [Step(seconds=s, scheduling_s=0.003) for s in (0.030, 0.010, 0.040)]
    line = waiting_line(16, {0: none, 1000: many})
    assert "16 decodes: 20.00 ms with 0 waiting, 30.00 ms with 1,000 (1.50 x)" in line
    assert "1.000 ms and 3.000 ms" in line


def test_command_prints_one_table_per_concurrency(tiny: Path) -> None:
    result = bench(tiny, "--no-peer", "--output-tokens", "10", "--concurrency", "1", "--concurrency", "2")
    assert result.exit_code == 0, result.output
    assert "1 requests of 8 + 10 tokens" in result.output and "2 requests of 8 + 10 tokens" in result.output
    assert "a step of 2 decodes" in result.output
    assert "over HTTP" not in result.output


def test_too_few_tokens_to_compare_steps_are_refused(tiny: Path) -> None:
    result = bench(tiny, "--output-tokens", "9")
    assert result.exit_code == 2
    assert "9 is too few to compare steps: 10 at least, or --waiting 0" in result.output


def test_a_peer_that_is_not_there_is_told_before_anything_is_measured(tiny: Path) -> None:
    with openai_server.serving() as peer:
        url = peer.url
    result = bench(tiny, "--peer-url", f"other={url}")
    assert result.exit_code == 1
    assert result.stdout == "" and f"other at {url} doesn't answer" in result.stderr


@pytest.mark.e2e
def test_servers_are_compared_with_ours_over_http(tiny: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {openai_server.__file__} "$@"\n')
    python.chmod(0o755)
    with openai_server.serving() as peer:
        result = bench(
            tiny, "--no-peer", "--output-tokens", "3", "--waiting", "0", "--concurrency", "2",
            "--vllm-python", str(python), "--peer-url", f"other={peer.url}",
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "schedtop fp32 over HTTP is" in result.output
    assert " x vLLM server fp32;" in result.output and " x other;" in result.output
    assert len(peer.bodies) == 2 * 2  # the warm-up and a round


@pytest.mark.e2e
def test_our_server_answers_what_our_engine_does(tiny: Path, ours: OurEngine, tmp_path: Path) -> None:
    load = Load(concurrency=3, prompt_tokens=20, output_tokens=5)
    prompts = load.prompts(400, "server")
    with running(schedtop_server(str(tiny), "fp32", THREADS, load, tmp_path)) as server:
        assert isinstance(server, HttpServer)
        texts = server.run(prompts, 5).answers
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny)
    assert list(texts) == [tokenizer.decode(answer) for answer in ours.run(prompts, 5).answers]
