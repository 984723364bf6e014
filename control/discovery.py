"""Where sockets, tokens and state live, and which engines are running. Finds paths; opens nothing but to look."""

import os
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

from schedtop.control.errors import NoEngine, SocketRefused

CONNECT_VARIABLE = "SCHEDTOP_CONNECT"
TOKEN_VARIABLE = "SCHEDTOP_TOKEN"
MAX_PATH_BYTES = 103 if sys.platform == "darwin" else 107
"""Longest path of a unix socket, in bytes."""
_URL_SCHEMES = ("http://", "https://")
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


def state_folder() -> Path:
    """Where audit files live: `$XDG_STATE_HOME/schedtop`, else `~/.local/state/schedtop`."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "schedtop"


def socket_folder() -> Path:
    """Where engines put their sockets: `$XDG_RUNTIME_DIR/schedtop`, else `run` in the state folder."""
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    return Path(base) / "schedtop" if base.startswith("/") else state_folder() / "run"


def socket_path(engine_name: str) -> Path:
    """The default socket of an engine."""
    return socket_folder() / f"{engine_name}.sock"


def token_path(socket: Path) -> Path:
    """The file in which a gateway on this socket leaves the token for clients of the same user."""
    return socket.with_suffix(".token") if socket.suffix == ".sock" else Path(f"{socket}.token")


def is_url(target: str) -> bool:
    """Whether a connect target names a gateway rather than a socket."""
    return target.startswith(_URL_SCHEMES)


def find_token(url: str) -> str | None:
    """The bearer token for a gateway: `SCHEDTOP_TOKEN`, else the token file of this user's one live engine.

    Token files outlive their engines. Where none is live (a socket elsewhere), the only file there is.
    Files are read for gateways on this machine only: the local token must not be sent to somebody else's host.
    """
    if token := os.environ.get(TOKEN_VARIABLE):
        return token
    try:
        files = token_files(url)
        return files[0].read_text().strip() or None if len(files) == 1 else None
    except OSError:
        return None


def token_files(url: str) -> list[Path]:
    """Files that may hold the token for a gateway: none for one on another machine."""
    if (urlsplit(url).hostname or "") not in _LOOPBACK_HOSTS:
        return []
    try:
        files = sorted(path for path in socket_folder().iterdir() if path.suffix == ".token")
    except OSError:
        return []
    return [path for path in files if is_live(path.with_suffix(".sock"))] or files


def check_path_length(path: Path) -> None:
    """Raise `SocketRefused` for a path too long for a unix socket."""
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_PATH_BYTES:
        raise SocketRefused(
            f"the socket path {path} has {num_bytes} bytes, the limit is {MAX_PATH_BYTES}; "
            "give a shorter one with --socket, or set XDG_RUNTIME_DIR to a short folder"
        )


def is_live(path: Path) -> bool:
    """Whether a server answers on the socket at `path`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except (OSError, ValueError):
            return False
        return True


def discover() -> list[str]:
    """Sockets in the default folder on which an engine answers, by name."""
    folder = socket_folder()
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".sock")
    except OSError:
        return []
    return [os.fspath(path) for path in paths if path.is_socket() and is_live(path)]


def resolve(connect: str | None) -> str:
    """What to connect to: `connect`, else SCHEDTOP_CONNECT, else the one live engine.

    Raises `NoEngine` when the choice is empty or open; the message says how to go on.
    """
    if target := connect or os.environ.get(CONNECT_VARIABLE):
        if "://" in target and not is_url(target):
            raise NoEngine(f"{target} is neither a socket's path nor the http:// or https:// address of a gateway")
        return target
    live = discover()
    if not live:
        raise NoEngine(
            f"no engine is running (looked in {socket_folder()}); start one with `schedtop serve`, "
            f"or name one with --connect PATH|URL or {CONNECT_VARIABLE}"
        )
    if len(live) > 1:
        listed = "\n".join(f"  --connect {path}" for path in live)
        raise NoEngine(f"{len(live)} engines are running; choose one:\n{listed}")
    return live[0]
