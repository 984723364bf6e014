"""What ships for running as a service: the example settings are true, the unit starts and ends what it should."""

import configparser
import re
import shlex
from pathlib import Path

import pytest

from schedtop.cli.gateway import gateway as gateway_command
from schedtop.cli.serve import serve as serve_command
from schedtop.control.serve import GATEWAY_DRAIN_S
from schedtop.control.server import FLUSH_S, MAX_CONNECTIONS
from schedtop.control.settings import ServeSettings, load_settings
from schedtop.control.supervise import END_S
from schedtop.engine.config import EngineConfig
from schedtop.engine.knobs import initial_knobs

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = DOCS / "schedtop.toml"
COMMENTED_OUT = re.compile(r"^# ?([a-z_]+) = .*$", flags=re.MULTILINE)


def read_unit(name):
    parser = configparser.ConfigParser(interpolation=None, delimiters=("=",))
    parser.optionxform = str
    parser.read(DOCS / name)
    return parser


@pytest.fixture(scope="module")
def unit():
    return read_unit("schedtop@.service")


def test_the_example_settings_are_read_and_their_knobs_are_in_range():
    settings = load_settings(EXAMPLE, {})
    sizes = EngineConfig(max_num_batched_tokens=settings.max_num_batched_tokens, max_num_seqs=settings.max_num_seqs)
    knobs = initial_knobs(sizes, **settings.knobs)
    assert settings.knobs
    assert {name: getattr(knobs, name) for name in settings.knobs} == settings.knobs


def test_the_example_names_every_setting_there_is():
    text = EXAMPLE.read_text()
    set_here = re.findall(r"^([a-z_]+) = ", text.split("[knobs]")[0], flags=re.MULTILINE)
    named = {*set_here, *COMMENTED_OUT.findall(text), "knobs"}
    assert named == set(ServeSettings.__struct_fields__)


@pytest.mark.parametrize("name", COMMENTED_OUT.findall(EXAMPLE.read_text()))
def test_a_line_that_is_commented_out_can_be_used_as_it_stands(name, tmp_path):
    file = tmp_path / "settings.toml"
    names = "lora|max_adapters" if name == "max_adapters" else name  # a number of adapters wants adapters
    file.write_text(re.sub(rf"^# ?((?:{names}) = .*)$", r"\1", EXAMPLE.read_text(), flags=re.MULTILINE))
    assert getattr(load_settings(file, {}), name) != getattr(ServeSettings(), name)


def test_what_the_example_sets_outside_knobs_is_the_default():
    settings = load_settings(EXAMPLE, {})
    changed = {
        name for name in ServeSettings.__struct_fields__ if getattr(settings, name) != getattr(ServeSettings(), name)
    }
    assert changed == {"knobs"}


def test_the_units_command_line_is_one_of_ours(unit):
    program, command, *arguments = shlex.split(unit["Service"]["ExecStart"].replace("%i", "main"))
    assert (Path(program).name, command) == ("schedtop", "serve")
    given = serve_command.make_context("serve", arguments).params
    assert (str(given["config"]), given["name"]) == ("/etc/schedtop/main.toml", "main")


def test_the_unit_waits_longer_than_a_drain_and_leaves_the_gateway_to_serve(unit):
    drain = load_settings(EXAMPLE, {}).drain
    assert GATEWAY_DRAIN_S < END_S
    assert int(unit["Service"]["TimeoutStopSec"]) > drain + FLUSH_S + END_S
    assert unit["Service"]["KillMode"] == "mixed"


def test_the_unit_puts_socket_and_audit_log_into_folders_that_systemd_makes_private(unit, monkeypatch):
    from schedtop.control import discovery

    service = unit["Service"]
    for assignment in shlex.split(service["Environment"]):
        monkeypatch.setenv(*assignment.split("=", 1))
    assert discovery.socket_folder() == Path("/run") / service["RuntimeDirectory"]
    assert discovery.state_folder() == Path("/var/lib") / service["StateDirectory"]
    assert service["RuntimeDirectoryMode"] == service["StateDirectoryMode"] == "0700"
    assert service["RuntimeDirectoryPreserve"] == "yes"  # one instance's end must not take the others' sockets


def test_the_unit_allows_as_many_open_files_as_there_may_be_clients(unit):
    assert int(unit["Service"]["LimitNOFILE"]) > 2 * MAX_CONNECTIONS


def test_the_gateways_own_unit_looks_for_the_engine_where_its_unit_puts_it(unit):
    apart = read_unit("schedtop-gateway@.service")
    program, command, *arguments = shlex.split(apart["Service"]["ExecStart"].replace("%i", "main"))
    given = gateway_command.make_context("gateway", arguments).params
    assert (Path(program).name, command) == ("schedtop", "gateway")
    assert given["connect"] == f"/run/{unit['Service']['RuntimeDirectory']}/main.sock"
    assert load_settings(EXAMPLE, {"gateway": False}).gateway is False
    assert int(apart["Service"]["TimeoutStopSec"]) > given["drain"]
    for key in ("User", "Environment", "RuntimeDirectory", "RuntimeDirectoryMode", "RuntimeDirectoryPreserve", "UMask"):
        assert apart["Service"][key] == unit["Service"][key], key
    assert "Requires" not in apart["Unit"] and "BindsTo" not in apart["Unit"], "an engine's end isn't the gateway's"
