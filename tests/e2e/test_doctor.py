"""`schedtop doctor` on a sound engine, on none, and on a folder that others can read."""

import pytest
from processes import Home, Served

pytestmark = pytest.mark.e2e


def verdicts(home: Home, *options: str) -> dict[str, str]:
    """Subject -> verdict."""
    import json

    return {finding["subject"]: finding["verdict"] for finding in json.loads(home.schedtop(*options).stdout)}


def test_a_running_engine_is_examined(served: Served) -> None:
    run = served.home.schedtop("doctor")
    assert run.returncode == 0, run.stdout
    assert "engine schedtop: simulated on" in run.stdout and "block accounting is sound" in run.stdout


def test_without_an_engine_it_says_so_and_is_content(home: Home) -> None:
    found = verdicts(home, "doctor", "--json")
    assert (found["engines"], found["client packages"]) == ("note", "ok")


def test_a_socket_folder_open_to_others_is_bad(home: Home) -> None:
    folder = home.folder / "run" / "schedtop"
    folder.mkdir(mode=0o755)
    run = home.schedtop("doctor")
    assert run.returncode == 1
    assert f"chmod 700 {folder}" in run.stdout
