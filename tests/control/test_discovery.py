"""Where things live, and which engine is meant."""

import socket

import pytest

from schedtop.control import discovery
from schedtop.control.errors import NoEngine
from schedtop.control.unix_socket import open_socket


@pytest.fixture(autouse=True)
def own_environment(monkeypatch, folder):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    for name in ("SCHEDTOP_CONNECT", "SCHEDTOP_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def engine():
    """Open a listening socket under an engine's name."""
    opened = []

    def start(name: str) -> str:
        opened.append(open_socket(discovery.socket_path(name)))
        return str(opened[-1].path)

    yield start
    for listening in opened:
        listening.close()


def test_without_an_engine_the_error_says_how_to_start_one():
    with pytest.raises(NoEngine, match=r"schedtop serve.*--connect"):
        discovery.resolve(None)


def test_one_engine_is_found_by_itself(engine):
    path = engine("one")
    assert discovery.resolve(None) == path


def test_several_engines_are_listed_to_choose_from(engine):
    paths = [engine("b"), engine("a")]
    assert discovery.discover() == sorted(paths)
    with pytest.raises(NoEngine) as refusal:
        discovery.resolve(None)
    assert all(path in str(refusal.value) for path in paths)


def test_what_is_named_wins_over_the_environment_and_that_over_what_runs(engine, monkeypatch):
    engine("one")
    monkeypatch.setenv("SCHEDTOP_CONNECT", "/from/environment.sock")
    assert discovery.resolve(None) == "/from/environment.sock"
    assert discovery.resolve("http://named:8000") == "http://named:8000"


def test_an_address_of_another_kind_is_refused_as_such():
    with pytest.raises(NoEngine, match="ftp://host is neither a socket's path nor"):
        discovery.resolve("ftp://host")


def test_stale_sockets_and_other_files_are_not_engines(engine):
    path = engine("live")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(discovery.socket_folder() / "stale.sock"))
    (discovery.socket_folder() / "file.sock").write_text("")
    assert discovery.discover() == [path]


def test_without_a_runtime_folder_sockets_live_in_the_state_folder(monkeypatch, folder):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert discovery.socket_folder() == folder / "state" / "schedtop" / "run"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert discovery.socket_folder() == folder / "state" / "schedtop" / "run"


def test_the_local_token_is_never_sent_to_another_machine(engine):
    discovery.token_path(discovery.socket_path("one")).parent.mkdir(mode=0o700)
    discovery.token_path(discovery.socket_path("one")).write_text("secret\n")
    assert discovery.find_token("http://127.0.0.1:8000") == "secret"
    assert discovery.find_token("http://localhost:8000/") == "secret"
    assert discovery.find_token("https://elsewhere:8000") is None


def test_token_files_of_dead_engines_are_in_nobodys_way(engine):
    engine("live")
    for name in ("dead", "live", "older"):
        discovery.token_path(discovery.socket_path(name)).write_text(f"token of {name}")
    assert discovery.find_token("http://127.0.0.1:8000") == "token of live"


def test_of_several_live_engines_no_token_is_guessed(engine):
    for name in ("a", "b"):
        engine(name)
        discovery.token_path(discovery.socket_path(name)).write_text(name)
    assert discovery.find_token("http://127.0.0.1:8000") is None
    assert [path.stem for path in discovery.token_files("http://127.0.0.1:8000")] == ["a", "b"]
    assert discovery.token_files("https://elsewhere:8000") == []


def test_with_several_token_files_none_is_guessed():
    for name in ("a", "b"):
        path = discovery.token_path(discovery.socket_path(name))
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_text(name)
    assert discovery.find_token("http://127.0.0.1:8000") is None


def test_a_token_in_the_environment_goes_wherever_it_is_told_to(monkeypatch):
    monkeypatch.setenv("SCHEDTOP_TOKEN", "given")
    assert discovery.find_token("https://elsewhere:8000") == "given"
