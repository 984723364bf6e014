"""The table of rules in the documentation names functions that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scheduler.md").read_text("utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and ".py`" in line]


def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@pytest.mark.parametrize("row", ROWS)
def test_every_function_named_beside_a_rule_is_where_the_page_says(row: str) -> None:
    path = None
    for word in re.findall(r"`([^`]+)`", row.split("|")[2]):
        if word.endswith((".py", "/")):
            path = find(word)
        else:
            assert path is not None
            assert word in names_in(path)


def find(word: str) -> Path:
    for folder in ("", "engine", "engine/sched"):
        if (path := ROOT / folder / word).exists():
            return path
    raise AssertionError(f"{word} isn't there")
