"""The root of the command line: lazy, complete, and never a traceback for what a user did."""

import importlib
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from schedtop.cli import main
from schedtop.engine.errors import SchedtopError

TARGETS = [target for section in main.SECTIONS.values() for target, _ in section.values()]


def schedtop(*arguments: str) -> Result:
    return CliRunner().invoke(main.cli, list(arguments), prog_name="schedtop")


@pytest.fixture
def failing_command(monkeypatch: pytest.MonkeyPatch) -> click.Command:
    """A command that fails as ours do, in place of every command's module."""

    @click.command()
    @click.option("--click-error", is_flag=True)
    def fail(click_error: bool) -> None:
        if click_error:
            raise click.ClickException("the disk is full; free some space")
        raise SchedtopError("x=9 is above its ceiling 8")

    monkeypatch.setattr(main.LazyGroup, "get_command", lambda *_: fail)
    return fail


@pytest.mark.parametrize("target", TARGETS)
def test_every_command_in_the_table_exists(target: str) -> None:
    module, attribute = target.split(":")
    assert isinstance(getattr(importlib.import_module(module), attribute), click.Command)


def test_help_lists_every_command_and_imports_none() -> None:
    code = """
import sys
from pathlib import Path
from schedtop.cli.main import cli
try:
    cli(["--help"], prog_name="schedtop")
except SystemExit:
    pass
extra = sorted(n for n in sys.modules if n.startswith("schedtop.cli.") and n != "schedtop.cli.main")
print("IMPORTED", extra, sorted({"torch", "textual", "aiohttp", "yaml"} & sys.modules.keys()))
"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "IMPORTED [] []"
    listed = {line.split()[0] for line in output.splitlines() if line.startswith("  ") and line.split()}
    assert {name for section in main.SECTIONS.values() for name in section} <= listed


def test_an_error_a_user_caused_is_one_line_and_exit_status_1(failing_command: click.Command) -> None:
    result = schedtop("knobs")
    assert (result.exit_code, result.stderr) == (1, "schedtop: error: x=9 is above its ceiling 8\n")


def test_a_plain_click_failure_looks_the_same(failing_command: click.Command) -> None:
    result = schedtop("knobs", "--click-error")
    assert (result.exit_code, result.stderr) == (1, "schedtop: error: the disk is full; free some space\n")


def test_a_misspelt_command_is_answered_with_the_nearest_and_exit_status_2() -> None:
    result = schedtop("knbos")
    assert result.exit_code == 2
    assert "did you mean 'knobs'?" in result.stderr


def test_screen_options_before_a_command_are_refused_not_dropped() -> None:
    result = schedtop("--json", "conformance")
    assert result.exit_code == 2
    assert "--json before a command" in result.stderr


def test_connect_before_a_command_reaches_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    from schedtop.control.discovery import resolve

    monkeypatch.delenv(main.CONNECT_VARIABLE, raising=False)
    seen = click.Command("seen", callback=lambda: click.echo(resolve(None)))
    monkeypatch.setattr(main.LazyGroup, "get_command", lambda *_: seen)
    assert schedtop("--connect", "/run/here.sock", "knobs").output == "/run/here.sock\n"
    assert main.CONNECT_VARIABLE not in main.os.environ


def test_the_connect_variable_is_the_one_that_discovery_reads() -> None:
    from schedtop.control import discovery

    assert main.CONNECT_VARIABLE == discovery.CONNECT_VARIABLE


def test_a_full_disk_is_one_line_and_no_traceback() -> None:
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [sys.executable, "-P", "-m", "schedtop", "sim", "list"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert run.returncode == 1
    assert run.stderr == "schedtop: error: the output can't be written: No space left on device\n"


@pytest.mark.parametrize("options", [["--once"], ["--json"], []])
def test_a_theme_that_there_is_not_is_refused_however_the_state_is_shown(options: list[str]) -> None:
    run = schedtop(*options, "--theme", "nope")
    assert run.exit_code == 1
    assert "no theme is called 'nope'; there are " in run.output
