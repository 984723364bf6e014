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
_FAREWELL = "{}: running requests get {:g} s to finish; again to cut them"
WATCH_S = 0.2
"""Between looks at the gateway process and for signals to tell of."""
GATEWAY_DRAIN_S = 5.0
"""For the gateway's last answers: when it is asked to end, the engine has ended every request already."""


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
    with _signals(server, settings.drain) as seen:
        for line in _introduction(info, path, audit_path, as_json):
            say(line)
        _watch(server, gateway, seen, lambda name: say(_FAREWELL.format(name, settings.drain)))
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
    arguments += ["--drain", f"{GATEWAY_DRAIN_S:g}"]
    for name in settings.allowed_hosts:
        arguments += ["--allowed-host", name]
    if settings.token_file is not None:
        arguments += ["--token-file", settings.token_file]
    if settings.playbooks is not None:
        arguments += ["--playbooks", settings.playbooks]
    return arguments


def _watch(
    server: ControlServer, gateway: SupervisedProcess | None, seen: list[str], tell: Callable[[str], None]
) -> None:
    """Until the server has ended; the gateway is kept alive meanwhile, and through the drain."""
    is_told = has_ended = False
    while not has_ended:
        has_ended = server.ended.wait(WATCH_S)
        if seen and not is_told:
            is_told = True
            tell(seen[0])
        if gateway is not None and not has_ended:
            gateway.watch()


@contextlib.contextmanager
def _signals(server: ControlServer, drain_s: float) -> Iterator[list[str]]:
    """SIGTERM, SIGINT and SIGHUP end the server gently, the second time at once. Yields the names of those that came.

    The handler prints nothing: it may run in the middle of a print, which Python then refuses with an exception.
    """
    seen: list[str] = []

    def on_signal(number: int, _frame: object) -> None:
        seen.append(signal.Signals(number).name)
        server.begin_stop(drain_s)

    before = {number: signal.signal(number, on_signal) for number in _END_SIGNALS}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
