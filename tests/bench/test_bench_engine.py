"""The engine's benchmark measures what it says: all tokens answered, time fully accounted for. Not how fast."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, LlamaConfig

from schedtop.cli.bench_engine import engine, report
from schedtop.engine.runner.bench import Load, OurEngine, Round, Transformers, alternate


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
    return path


def test_rounds_alternate_and_all_time_is_accounted_for(tiny: Path) -> None:
    load = Load(concurrency=3, prompt_tokens=20, output_tokens=5)
    threads = torch.get_num_threads()
    ours = OurEngine(str(tiny), "fp32", threads, load)
    results = alternate([ours, Transformers(str(tiny), threads)], load, 2)
    assert [len(rounds) for rounds in results.values()] == [2, 2]
    for one in results[ours.name]:
        assert set(one.split) >= {"matmul", "attention", "sampling", "scheduling and bookkeeping"}
        assert sum(one.split.values()) == pytest.approx(1.0)
        assert min(one.split.values()) >= 0.0


def test_prompts_differ_from_round_to_round_and_are_the_same_for_all() -> None:
    load = Load(concurrency=2, prompt_tokens=10)
    assert load.prompts(400, 1) == load.prompts(400, 1) != load.prompts(400, 2)


def test_report_shows_medians_and_the_ratio() -> None:
    rounds = [Round(tokens_per_s=speed, split={"matmul": 0.75, "attention": 0.25}) for speed in (100.0, 90.0, 200.0)]
    lines = report({"ours": rounds, "peer": [Round(tokens_per_s=50.0)] * 3})
    assert "100.0 tokens/s   90.0 to 200.0" in lines[0]
    assert "ours is 2.00 x peer" in lines[2]
    assert "matmul 75%, attention 25%" in lines[3]


def test_command_prints_one_table_per_concurrency(tiny: Path) -> None:
    arguments = ["--model", str(tiny), "--no-peer", "--rounds", "1", "--prompt-tokens", "8", "--output-tokens", "3"]
    threads = ["--threads", str(torch.get_num_threads())]
    result = CliRunner().invoke(engine, [*arguments, *threads, "--concurrency", "1", "--concurrency", "2"])
    assert result.exit_code == 0, result.output
    assert "1 requests of 8 + 3 tokens" in result.output and "2 requests of 8 + 3 tokens" in result.output
