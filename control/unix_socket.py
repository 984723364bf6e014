"""Binding the control socket safely: private folder, private socket, one server per path, nothing foreign removed.

Only paths, locks and peers in here; what is said over the socket is `session.py`'s and `server.py`'s business.
"""

import contextlib
import fcntl
import os
import socket
import stat
import struct
from pathlib import Path

from schedtop.control.discovery import check_path_length, is_live
from schedtop.control.errors import SocketRefused

BACKLOG = 1024
"""Clients that may connect at once, before any of them is let in."""


class ListeningSocket:
    """A bound, listening unix socket and the lock that keeps its path ours while we live."""

    def __init__(self, path: Path, listener: socket.socket, lock: int) -> None:
        self.path = path
        self.listener = listener
        self._lock = lock
        self._inode = path.lstat().st_ino

    def close(self) -> None:
        """Stop listening and remove our socket file; idempotent. The lock file stays: removing it would race."""
        self.listener.close()
        if self._lock < 0:
            return
        with contextlib.suppress(OSError):
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()
        os.close(self._lock)
        self._lock = -1


def open_socket(path: Path) -> ListeningSocket:
    """Bind `path`, mode 0600 from birth, in a folder that others can't write.

    Takes over a stale socket; raises `SocketRefused` for a live one, for anything that isn't a socket, for an unsafe
    folder and for a path that is too long.
    """
    path = path.absolute()
    check_path_length(path)
    _prepare_folder(path.parent)
    _is_socket(path)
    lock = _take_lock(path)
    try:
        if _is_socket(path):
            _remove_stale(path)
        return ListeningSocket(path, _bind(path), lock)
    except BaseException:
        os.close(lock)
        raise


def peer_uid(connection: socket.socket) -> int | None:
    """The uid of the process at the other end; None where the system doesn't tell."""
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    layout = struct.Struct("3i")  # pid, uid, gid
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
    uid: int = layout.unpack(credentials)[1]
    return uid


def _prepare_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise SocketRefused(f"the socket's folder {folder} can't be made: {error.strerror}; choose another") from None
    if status.st_uid not in (os.getuid(), 0):
        raise SocketRefused(f"the socket's folder {folder} belongs to uid {status.st_uid}; choose one of your own")
    is_shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if is_shared and not status.st_mode & stat.S_ISVTX:
        raise SocketRefused(f"others may write to the socket's folder {folder}; chmod 700 it, or choose another")


def _take_lock(path: Path) -> int:
    """Own `PATH.lock` for the life of this server: two that start at once can't both find the socket stale."""
    try:
        descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SocketRefused(f"{path}.lock can't be opened: {error.strerror}; choose another folder") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise _taken(path) from None
    return descriptor


def _taken(path: Path) -> SocketRefused:
    return SocketRefused(f"a server is already running on {path}; stop it, or start this one with another --name")


def _is_socket(path: Path) -> bool:
    """Whether there is a socket (not a link to one); raises `SocketRefused` for anything else that is there."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(mode):
        raise SocketRefused(f"{path} exists and isn't a socket: it won't be removed; move it away, or give --socket")
    return True


def _remove_stale(path: Path) -> None:
    if is_live(path):
        raise _taken(path)
    path.unlink()


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    previous = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
    except OSError as error:
        listener.close()
        raise SocketRefused(f"the socket {path} can't be made: {error.strerror}") from None
    finally:
        os.umask(previous)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener
