"""The documentation: generated pages are current, links lead somewhere, commands that it names exist."""

import re
import runpy
from pathlib import Path

import pytest

from schedtop.cli.main import SECTIONS
from schedtop.control.playbook.reader import parse_playbook

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
GENERATED = runpy.run_path(str(REPOSITORY / "docs" / "generate.py"))["pages"]()


@pytest.mark.parametrize("name", sorted(GENERATED))
def test_a_generated_page_is_current(name: str) -> None:
    text = (REPOSITORY / "docs" / "reference" / name).read_text(encoding="utf-8")
    assert text == GENERATED[name], "run .venv/bin/python docs/generate.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_to_files_that_exist(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_command_that_is_named_exists(page: Path) -> None:
    named = re.findall(r"(?:^|`)schedtop ([a-z][a-z-]+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    known = {name for commands in SECTIONS.values() for name in commands}
    assert set(named) - known == set()


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, pending = set(), [REPOSITORY / "README.md"]
    while pending:
        page = pending.pop().resolve()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        pending += [page.parent / t for t in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8")) if "://" not in t]
    assert {page.resolve() for page in PAGES} - reached == set()


def test_the_example_playbook_in_the_documentation_loads() -> None:
    text = (REPOSITORY / "docs" / "playbooks.md").read_text(encoding="utf-8")
    examples = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert [parse_playbook(example, "docs").name for example in examples] == ["protect-itl"]
