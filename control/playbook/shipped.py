"""Finds the playbooks that come with the package."""

import difflib
from pathlib import Path

import schedtop.playbooks
from schedtop.control.playbook.schema import BadPlaybook


def shipped_playbooks() -> list[Path]:
    """Their files, by name."""
    return sorted(path for folder in schedtop.playbooks.__path__ for path in Path(folder).glob("*.yaml"))


def find_playbook(name: str) -> Path:
    """A path as it is, or the shipped playbook of that name. Raises `BadPlaybook`."""
    path = Path(name)
    if path.suffix or path.exists():
        return path
    known = {shipped.stem: shipped for shipped in shipped_playbooks()}
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise BadPlaybook(f"no file and no shipped playbook is called {name!r}{hint} (shipped: {', '.join(known)})")
    return known[name]
