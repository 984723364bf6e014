"""Finds playbooks by name: those that come with the package, and those of a folder that an operator set up."""

import difflib
from pathlib import Path

import schedtop.playbooks
from schedtop.control.playbook.reader import BadPlaybook


def shipped_playbooks() -> list[Path]:
    """Their files, by name."""
    return sorted(path for folder in schedtop.playbooks.__path__ for path in Path(folder).glob("*.yaml"))


def named_playbooks(folder: Path | None = None) -> dict[str, Path]:
    """Every playbook that has a name: shipped ones, and the folder's, which come first where a name is in both."""
    own = sorted(folder.glob("*.yaml")) if folder is not None else []
    return {path.stem: path for path in [*shipped_playbooks(), *own]}


def find_named(name: str, folder: Path | None = None) -> Path:
    """The playbook of that name. No path is ever made from the name. Raises `BadPlaybook`."""
    known = named_playbooks(folder)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise BadPlaybook(f"no playbook is called {name!r}{hint} (there are: {', '.join(known)})")
    return known[name]


def find_playbook(name: str) -> Path:
    """A path as it is, or the shipped playbook of that name. Raises `BadPlaybook`."""
    path = Path(name)
    return path if path.suffix or path.exists() else find_named(name)
