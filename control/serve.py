"""`schedtop serve`: one process with the engine and its control server, which supervises the gateway's process.

Puts the parts together and takes them apart in the right order; what each does is elsewhere. Must not import aiohttp,
and torch only through a real runner (`build.py`).
"""

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from schedtop.control.audit import AuditLog
from schedtop.control.build import build
from schedtop.control.discovery import socket_path, state_folder
from schedtop.control.messages import EngineInfo
from schedtop.control.server import ControlServer
from schedtop.control.settings import ServeSettings
from schedtop.control.supervise import SupervisedProcess
from schedtop.engine.loop import EngineLoop

logger = logging.getLogger(__name__)

_END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WATCH_S = 0.2
"""Between looks at the gateway process."""


def serve(settings: ServeSettings, say: Callable[[str], None], as_json: bool = False) -> int:
    """Run until a signal or the engine's death; returns the exit status. `say` prints a line to the operator.

    The first SIGTERM, SIGINT or SIGHUP lets running requests finish (`settings.drain` seconds at most), the second
    doesn't. `as_json`: say in one line of JSON who and where the engine is, once it is up.
    Raises `ConfigError` or `SocketRefused` if it can't start.
    """
    path = Path(settings.socket) if settings.socket else socket_path(settings.name)
    audit_path = Path(settings.audit) if settings.audit else state_folder() / f"{settings.name}.audit.sqlite"
    core, info = build(settings)
    audit = AuditLog(audit_path)
    engine = EngineLoop(core)
    server = ControlServer(engine, info, core.knob_table, audit)
    engine.start()
    try:
        server.start(path)
    except BaseException:
        engine.stop()
        core.shutdown()
        audit.close()
        raise
    gateway = SupervisedProcess(gateway_arguments(settings, path)) if settings.gateway else None
    with _signals(server, settings.drain, say):
        for line in _introduction(info, path, audit_path, as_json):
            say(line)
        _watch(server, gateway)
    if gateway is not None:
        gateway.end()
    engine.stop()
    audit.close()
    if engine.failure is not None:
        say(f"the engine died: {type(engine.failure).__name__}: {engine.failure}")
        return 1
    core.shutdown()
    return 0


def _introduction(info: EngineInfo, socket: Path, audit: Path, as_json: bool) -> list[str]:
    """Who and where the engine is, for people or for programs."""
    if as_json:
        return [msgspec.json.encode({"info": info, "socket": str(socket), "audit": str(audit)}).decode()]
    return [
        f"engine {info.name}: {info.model} on {info.backend}, {info.num_usable_blocks} KV blocks of {info.block_size}",
        f"control socket {socket}, audit log {audit}",
    ]


def gateway_arguments(settings: ServeSettings, socket: Path) -> list[str]:
    """The gateway's command line, after `schedtop`."""
    arguments = ["gateway", "--connect", str(socket), "--host", settings.host, "--port", str(settings.port)]
    for name in settings.allowed_hosts:
        arguments += ["--allowed-host", name]
    if settings.token_file is not None:
        arguments += ["--token-file", settings.token_file]
    return arguments


def _watch(server: ControlServer, gateway: SupervisedProcess | None) -> None:
    """Until the server has ended; the gateway is kept alive meanwhile, and through the drain."""
    while not server.ended.wait(WATCH_S):
        if gateway is not None:
            gateway.watch()


@contextlib.contextmanager
def _signals(server: ControlServer, drain_s: float, say: Callable[[str], None]) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGHUP end the server gently, the second time at once."""
    num_seen = 0

    def on_signal(number: int, _frame: object) -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen == 1:
            say(f"{signal.Signals(number).name}: running requests get {drain_s:g} s to finish; again to cut them")
        server.begin_stop(drain_s)

    before = {number: signal.signal(number, on_signal) for number in _END_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
