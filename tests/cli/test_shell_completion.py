"""Completion in a real bash, as docs/control.md tells to switch it on; other shells through click's own protocol."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from schedtop.cli.main import SECTIONS
from schedtop.engine.config import EngineConfig
from schedtop.engine.knobs import knob_table

PAGE = Path(__file__).parents[2] / "docs" / "control.md"
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
COMMANDS = {name for commands in SECTIONS.values() for name in commands}
KNOBS = {f"{spec.name}=" for spec in knob_table(EngineConfig())}


def offered_by_bash(*words: str) -> list[str]:
    """What bash puts before somebody who presses tab after these words, the last of them unfinished."""
    (how_to,) = re.findall(r"^(eval .*bash_source schedtop\)\")", PAGE.read_text("utf-8"), flags=re.MULTILINE)
    typed = " ".join(shlex.quote(word) for word in words)
    script = f"""
{how_to}
function=$(complete -p schedtop | sed 's/.*-F \\([^ ]*\\).*/\\1/')
COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}
$function schedtop
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    ran = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    return ran.stdout.split()


def test_bash_completes_commands() -> None:
    assert set(offered_by_bash("schedtop", "")) == COMMANDS
    assert offered_by_bash("schedtop", "dra") == ["drain"]


def test_bash_completes_options_and_their_choices() -> None:
    assert "--mode" in offered_by_bash("schedtop", "pause", "--")
    assert offered_by_bash("schedtop", "pause", "--mode", "") == ["abort", "wait", "keep"]


def test_bash_completes_knobs_from_the_table() -> None:
    assert set(offered_by_bash("schedtop", "knobs", "set", "")) == KNOBS
    assert offered_by_bash("schedtop", "knobs", "set", "max_num_b") == ["max_num_batched_tokens="]
    assert offered_by_bash("schedtop", "serve", "--set", "watermark") == ["watermark="]


@pytest.mark.parametrize(
    ("unfinished", "offered"),
    [
        ("policy=", ["policy=fcfs", "policy=priority"]),
        ("policy=p", ["policy=priority"]),
        ("prefix_caching=", ["prefix_caching=true", "prefix_caching=false"]),
        ("watermark=", []),
        ("no_such_knob=", []),
    ],
)
def test_the_words_a_knob_may_have_are_completed_where_the_shell_keeps_the_word_whole(unfinished, offered) -> None:
    environment = {
        **ENVIRONMENT,
        "_SCHEDTOP_COMPLETE": "zsh_complete",
        "COMP_WORDS": f"schedtop knobs set {unfinished}",
        "COMP_CWORD": "3",
    }
    ran = subprocess.run(["schedtop"], capture_output=True, text=True, env=environment, check=True)
    assert [line for line in ran.stdout.splitlines() if "=" in line] == offered


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shells_script_can_be_had(shell: str) -> None:
    environment = {**ENVIRONMENT, "_SCHEDTOP_COMPLETE": f"{shell}_source"}
    ran = subprocess.run(["schedtop"], capture_output=True, text=True, env=environment, check=True)
    assert "_SCHEDTOP_COMPLETE" in ran.stdout
