"""Binding safely: cases B11 (a second server steals the first one's socket) and B13 (path longer than 107 bytes)."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from schedtop.control.discovery import MAX_PATH_BYTES, is_live
from schedtop.control.errors import SocketRefused
from schedtop.control.unix_socket import open_socket, peer_uid


def test_folder_and_socket_are_private_from_birth(folder):
    before = os.umask(0)
    try:
        listening = open_socket(folder / "new" / "e.sock")
    finally:
        assert os.umask(before) == 0, "the umask must be put back"
    assert stat.S_IMODE((folder / "new").stat().st_mode) == 0o700
    assert stat.S_IMODE(listening.path.stat().st_mode) == 0o600
    listening.close()


def test_the_socket_is_never_open_to_others_not_even_before_it_is_listened_on(folder, monkeypatch):
    born = []

    class Watched(socket.socket):
        def bind(self, address):
            super().bind(address)
            born.append(stat.S_IMODE(os.lstat(address).st_mode))

    monkeypatch.setattr(socket, "socket", Watched)
    before = os.umask(0)
    try:
        open_socket(folder / "e.sock").close()
    finally:
        os.umask(before)
    assert born == [0o600]


def test_b11_a_second_server_refuses_while_the_first_answers(folder):
    first = open_socket(folder / "e.sock")
    with pytest.raises(SocketRefused, match="already running"):
        open_socket(folder / "e.sock")
    assert is_live(folder / "e.sock")
    first.close()
    assert not (folder / "e.sock").exists()
    open_socket(folder / "e.sock").close()


def test_b11_a_live_socket_without_a_lock_is_respected_too(folder):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(folder / "e.sock"))
        other.listen()
        with pytest.raises(SocketRefused, match="already running"):
            open_socket(folder / "e.sock")


@pytest.mark.parametrize("has_stale_socket", [False, True])
def test_b11_of_many_that_start_at_once_one_owns_the_path(folder, has_stale_socket):
    path = folder / "e.sock"
    if has_stale_socket:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
    start = threading.Barrier(20)

    def begin(_):
        start.wait()
        try:
            return open_socket(path)
        except SocketRefused as refusal:
            return refusal

    with ThreadPoolExecutor(20) as starters:
        outcomes = list(starters.map(begin, range(20)))
    refusals = [outcome for outcome in outcomes if isinstance(outcome, SocketRefused)]
    (owner,) = (outcome for outcome in outcomes if not isinstance(outcome, SocketRefused))
    assert len(refusals) == 19
    assert all("already running" in str(refusal) for refusal in refusals)
    assert is_live(path)
    owner.close()


_SERVE_FOR_EVER = """
import sys, time
from pathlib import Path
from schedtop.control.unix_socket import open_socket
listening = open_socket(Path(sys.argv[1]))
print("up", flush=True)
time.sleep(600)
"""


def test_b11_the_socket_of_a_killed_server_is_taken_over(folder):
    path = folder / "e.sock"
    with subprocess.Popen([sys.executable, "-c", _SERVE_FOR_EVER, str(path)], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == b"up\n"
        with pytest.raises(SocketRefused):
            open_socket(path)
        first.send_signal(signal.SIGKILL)
    assert path.is_socket()
    second = open_socket(path)
    assert is_live(path)
    second.close()


@pytest.mark.parametrize("kind", ["file", "folder", "link", "link to a socket"])
def test_b11_what_is_no_socket_is_never_removed(folder, kind):
    path, target = folder / "e.sock", folder / "target"
    match kind:
        case "file":
            path.write_text("precious")
        case "folder":
            path.mkdir()
        case "link":
            target.write_text("precious")
            path.symlink_to(target)
        case _:
            with socket.socket(socket.AF_UNIX) as stale:
                stale.bind(str(target))
            path.symlink_to(target)
    with pytest.raises(SocketRefused, match="isn't a socket: it won't be removed"):
        open_socket(path)
    assert path.is_symlink() or path.exists()
    assert kind == "folder" or target.exists() or path.read_text() == "precious"


def test_closing_leaves_a_socket_alone_that_somebody_else_put_there(folder):
    ours = open_socket(folder / "e.sock")
    (folder / "e.sock").rename(folder / "moved.sock")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(folder / "e.sock"))
        ours.close()
        assert (folder / "e.sock").is_socket()


def test_a_folder_that_others_can_write_is_refused(folder):
    shared = folder / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(SocketRefused, match="others may write"):
        open_socket(shared / "e.sock")


def path_of(folder: Path, num_bytes: int, letter: str = "x") -> Path:
    """A path of exactly that many bytes."""
    room = num_bytes - len(os.fsencode(folder)) - 1
    width = len(letter.encode())
    return folder / (letter * (room // width) + "y" * (room % width))


@pytest.mark.parametrize("letter", ["x", "ö", "日"])
@pytest.mark.parametrize("num_bytes", [100, MAX_PATH_BYTES])
def test_b13_paths_up_to_the_limit_work_counted_in_bytes(folder, num_bytes, letter):
    path = path_of(folder, num_bytes, letter)
    listening = open_socket(path)
    assert is_live(path)
    listening.close()


@pytest.mark.parametrize("letter", ["x", "日"])
@pytest.mark.parametrize("num_bytes", [MAX_PATH_BYTES + 1, 200])
def test_b13_a_longer_path_is_refused_with_its_length_and_the_way_out(folder, num_bytes, letter):
    path = path_of(folder, num_bytes, letter)
    with pytest.raises(SocketRefused) as refusal:
        open_socket(path)
    for part in (str(path), f"{num_bytes} bytes", f"limit is {MAX_PATH_BYTES}", "--socket"):
        assert part in str(refusal.value)
    assert list(folder.iterdir()) == []


def test_the_peer_of_a_connection_is_known_by_the_system_not_by_its_word(folder):
    one, two = socket.socketpair(socket.AF_UNIX)
    with one, two:
        assert peer_uid(one) == os.getuid()
