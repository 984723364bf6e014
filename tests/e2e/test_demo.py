"""The demo and the served model, as a newcomer meets them: the real model, real processes."""

import json
import subprocess

import pytest
from processes import Home, Served
from terminal import Terminal

pytestmark = [pytest.mark.e2e, pytest.mark.model]


def test_the_headless_demo_generates_preempts_and_leaves_nothing_behind(home: Home) -> None:
    run = home.schedtop("demo", "--headless", "--seconds", "30", "--json")
    assert run.returncode == 0, run.stdout + run.stderr
    summary = json.loads(run.stdout)
    assert summary["problems"] == [] and summary["faults"] == []
    assert summary["tokens_generated"] > 0 and summary["preemptions"] >= 1
    assert (summary["in_use"], summary["free"] + summary["cached"]) == (0, summary["usable"])


def test_the_demo_on_a_terminal_shows_text_being_generated_and_takes_everything_down_at_the_end(home: Home) -> None:
    with Terminal(home, "demo", columns=120, lines=40) as terminal:
        terminal.wait_for_text("demo-chat")
        engine = home.json("--once", "--json")["info"]["pid"]
        terminal.press("q")
        assert terminal.wait_for_exit() == 0
    assert subprocess.run(["kill", "-0", str(engine)], capture_output=True, check=False).returncode != 0


def test_curl_gets_the_capital_of_france_from_the_served_model(home: Home) -> None:
    served = Served(home, "--num-kv-blocks", "128", "--max-num-batched-tokens", "256", "--max-num-seqs", "8")
    body = {
        "model": "smollm2", "temperature": 0, "max_tokens": 24,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }  # fmt: skip
    command = ["curl", "-sS", f"{served.url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    answer = subprocess.run([*command, "-d", json.dumps(body)], capture_output=True, text=True, check=True)
    assert "Paris" in json.loads(answer.stdout)["choices"][0]["message"]["content"]
    served.assert_nothing_lost()
    served.stop()
