"""What may be wrong with this machine and with a running engine, each with the way out. Looks, repairs nothing.

What is installed is looked at in the command line's `doctor.py`, which also prints.
"""

import contextlib
import os
import resource
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import msgspec

from schedtop import __version__
from schedtop.control.audit import read_audit_file
from schedtop.control.client import Client
from schedtop.control.discovery import check_path_length, is_live, is_url, socket_folder, socket_path, state_folder
from schedtop.control.errors import NoReply
from schedtop.control.messages import Ack, GetInfo, GetSnapshot, SelfCheck, SnapshotReply, SnapshotUpdate, Welcome
from schedtop.control.open_files import RESERVED
from schedtop.control.server import MAX_CONNECTIONS
from schedtop.engine.errors import ConfigError, SchedtopError

STALL_S = 10.0
"""With work pending, a last step older than this is worth a warning."""
REPLY_S = 10.0
"""An engine whose steps take longer is told as hanging."""
LOW_DISK_BYTES = 64 << 20
"""Less free space than this is too little for an audit log."""
EARLIEST_WALL = 1_735_689_600.0
"""2025-01-01: a clock that shows less was never set."""
CLOCK_SLACK_S = 5.0


class Verdict(StrEnum):
    """How a finding is meant."""

    OK = "ok"
    NOTE = "note"
    """Something is absent or unusual, which may be meant so."""
    BAD = "BAD"


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at."""

    verdict: Verdict
    subject: str
    detail: str


# ---- this machine -----------------------------------------------------------------------------------------------


def look_at_machine(port: int) -> Iterator[Finding]:
    """Folders, leftovers, disk, clock, open files, and the gateway's usual port."""
    yield from look_at_folder(socket_folder())
    yield look_at_disk(state_folder())
    yield look_at_clock(time.time())
    yield look_at_open_files()
    yield look_at_port(port)


def look_at_folder(folder: Path) -> Iterator[Finding]:
    """The folder of sockets and tokens, and what lies in it."""
    subject = "socket folder"
    try:
        check_path_length(socket_path("a-name-of-usual-length"))
    except SchedtopError as error:
        yield Finding(Verdict.BAD, subject, str(error))
        return
    if not folder.exists():
        yield _missing_folder(subject, folder)
        return
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        yield Finding(Verdict.BAD, subject, f"{folder} is no folder: move it away, or set XDG_RUNTIME_DIR elsewhere")
        return
    if status.st_uid != os.getuid():
        what = f"{folder} belongs to uid {status.st_uid}, you are {os.getuid()}: chown it, or set XDG_RUNTIME_DIR"
        yield Finding(Verdict.BAD, subject, what)
    elif mode := stat.S_IMODE(status.st_mode) & 0o077:
        yield Finding(Verdict.BAD, subject, f"{folder} is open to others ({mode:03o}): chmod 700 {folder}")
    else:
        yield Finding(Verdict.OK, subject, f"{folder}, only for you")
    for path in sorted(folder.iterdir()):
        yield from _look_at_entry(path)


def _missing_folder(subject: str, folder: Path) -> Finding:
    parent = next(parent for parent in folder.parents if parent.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        what = f"{folder} can't be made: you may not write to {parent}; set XDG_RUNTIME_DIR to a folder of your own"
        return Finding(Verdict.BAD, subject, what)
    return Finding(Verdict.OK, subject, f"{folder} (made when an engine starts)")


def _look_at_entry(path: Path) -> Iterator[Finding]:
    mode = path.lstat().st_mode
    if path.suffix == ".sock" and not stat.S_ISSOCK(mode):
        yield Finding(
            Verdict.BAD, f"socket {path.name}", f"{path} isn't a socket, no engine can start there: move it away"
        )
    elif path.suffix == ".sock" and not is_live(path):
        what = f"{path} is left of an engine that was killed: the next one of that name takes it over, or remove it"
        yield Finding(Verdict.NOTE, f"socket {path.name}", what)
    elif path.suffix == ".token" and stat.S_IMODE(mode) & 0o077:
        what = f"others can read {path} and so turn knobs: remove it and restart its gateway, which makes a new one"
        yield Finding(Verdict.BAD, f"token {path.name}", what)


def look_at_disk(folder: Path) -> Finding:
    """Room where audit logs are written by default."""
    place = next(place for place in (folder, *folder.parents) if place.exists())
    if not os.access(place, os.W_OK | os.X_OK):
        what = f"you may not write to {place}: audit logs can't go to {folder}; set XDG_STATE_HOME, or give --audit"
        return Finding(Verdict.BAD, "state folder", what)
    free = shutil.disk_usage(place).free
    if free < LOW_DISK_BYTES:
        what = f"{free >> 20} MiB are free at {place}: make room, or give --audit elsewhere, or changes go unrecorded"
        return Finding(Verdict.BAD, "state folder", what)
    return Finding(Verdict.OK, "state folder", f"{folder}, {free >> 20} MiB free")


def look_at_clock(wall: float) -> Finding:
    """Whether this machine knows what day it is."""
    day = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(wall))
    if wall < EARLIEST_WALL:
        return Finding(Verdict.BAD, "clock", f"it shows {day}: audit rows and recordings would; set it (timedatectl)")
    return Finding(Verdict.OK, "clock", day)


def look_at_open_files() -> Finding:
    """How many clients an engine started here could hold."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = MAX_CONNECTIONS + RESERVED
    if hard != resource.RLIM_INFINITY and hard < needed:
        room = max(0, hard - RESERVED)
        what = f"{hard} at most, so {room} clients of an engine: raise `ulimit -Hn` or LimitNOFILE to {needed}"
        return Finding(Verdict.NOTE if hard > RESERVED else Verdict.BAD, "open files", what)
    return Finding(Verdict.OK, "open files", f"enough for {MAX_CONNECTIONS} clients")


def look_at_port(port: int) -> Finding:
    """Whether a gateway could use its default port."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        if probe.connect_ex(("127.0.0.1", port)):
            return Finding(Verdict.OK, f"port {port}", "free")
    what = f"in use; if not by a gateway of yours, give yours another: `schedtop serve --port {port + 1}`"
    return Finding(Verdict.NOTE, f"port {port}", what)


# ---- a running engine -------------------------------------------------------------------------------------------


async def look_at_engine(target: str) -> list[Finding]:
    """Talk to an engine: is it of our version, does it move, is its accounting sound, can it write its audit log?"""
    subject = f"engine at {target}"
    try:
        async with await Client.connect(target, name="doctor", read_only=True) as client:
            subject = f"engine {client.welcome.info.name}"
            snapshot = await client.request(GetSnapshot(), REPLY_S)
            check, info = await client.request(SelfCheck(), REPLY_S), await client.request(GetInfo(), REPLY_S)
            welcome = client.welcome
    except NoReply as error:
        what = f"{error}: a step takes that long, or the engine hangs; its log tells, SIGTERM and a restart end it"
        return [Finding(Verdict.BAD, subject, what)]
    except SchedtopError as error:
        return [Finding(Verdict.BAD, subject, f"{error}{_why_silent(target)}")]
    assert isinstance(snapshot, SnapshotReply) and isinstance(check, Ack) and isinstance(info, Ack)
    return [
        *look_at_version(welcome),
        look_at_state(welcome, snapshot.update, check.data.get("faults", [])),
        *look_at_audit(subject, info.data.get("audit", {}), is_here=not is_url(target)),
        *look_at_gateway(subject, target, info.data.get("clients", {})),
        *look_at_time(subject, snapshot.update, time.time()),
    ]


def _why_silent(target: str) -> str:
    if is_url(target):
        return "; look at the gateway's log, or ask the engine by its socket"
    if is_live(Path(target)):
        return "; its process accepts connections but says nothing: it is stopped (kill -CONT) or hangs (restart it)"
    return ""


def look_at_version(welcome: Welcome) -> Iterator[Finding]:
    """Whether engine and client are of one version."""
    if (theirs := welcome.info.version) != __version__:
        what = f"it runs version {theirs}, this is {__version__}: restart it, or use its own `schedtop`"
        yield Finding(Verdict.NOTE, f"engine {welcome.info.name}", what)


def look_at_state(welcome: Welcome, update: SnapshotUpdate, faults: list[str]) -> Finding:
    """Whether it moves, and whether its books are right."""
    info, snapshot = welcome.info, update.snapshot
    subject = f"engine {info.name}"
    if faults:
        return Finding(Verdict.BAD, subject, f"{'; '.join(faults)}: drain and restart it, and report this")
    age_s = snapshot.mono - snapshot.last_step_mono if snapshot.last_step_mono is not None else 0.0
    is_stuck = snapshot.pause == "running" and age_s > STALL_S
    load = f"{snapshot.num_running} running, {snapshot.num_waiting} waiting, step {snapshot.step}"
    if update.shutting_down:
        return Finding(Verdict.NOTE, subject, f"it is ending and takes no new requests; {load}")
    if snapshot.num_running and is_stuck:
        what = f"work is pending, but the last step ended {age_s:.0f} s ago: its log tells why; SIGTERM ends it; {load}"
        return Finding(Verdict.BAD, subject, what)
    if snapshot.num_waiting and is_stuck:
        what = f"nobody who waits can run, and no step ended for {age_s:.0f} s: `schedtop requests` tells why; {load}"
        return Finding(Verdict.NOTE, subject, what)
    if snapshot.pause != "running":
        return Finding(Verdict.NOTE, subject, f"it is paused or drained: `schedtop resume` lets it go on; {load}")
    return Finding(Verdict.OK, subject, f"{info.model} on {info.backend}; {load}; block accounting is sound")


def look_at_audit(subject: str, audit: dict[str, str], is_here: bool) -> Iterator[Finding]:
    """The running engine's audit log: its last failure, room for more, and whether it can be read."""
    if failure := audit.get("failure"):
        yield Finding(Verdict.BAD, subject, f"{failure}: changes go unrecorded; make room at {audit['path']}")
    elif is_here and "path" in audit:
        path = Path(audit["path"])
        try:
            read_audit_file(path, 1)
        except ConfigError as error:
            yield Finding(Verdict.BAD, subject, f"{error}: restart it with another --audit")
            return
        with contextlib.suppress(OSError):
            if (free := shutil.disk_usage(path.parent).free) < LOW_DISK_BYTES:
                yield Finding(Verdict.BAD, subject, f"{free >> 20} MiB are free for its audit log {path}: make room")


def look_at_gateway(subject: str, target: str, clients: dict[str, int]) -> Iterator[Finding]:
    """A token without its gateway: one was here, and is gone."""
    token = Path(target).with_suffix(".token")
    if not is_url(target) and token.exists() and not clients.get("gateway"):
        what = f"{token.name} tells of a gateway, but none is connected: it died (the engine's log tells why), "
        yield Finding(Verdict.NOTE, subject, what + "or was of an earlier run; `schedtop gateway` starts one")


def look_at_time(subject: str, update: SnapshotUpdate, wall: float) -> Iterator[Finding]:
    """Whether the engine's clock is this machine's, `wall`: it isn't where the engine is elsewhere."""
    ahead = update.snapshot.wall - wall
    if abs(ahead) > CLOCK_SLACK_S:
        what = f"its clock is {ahead:+.0f} s from this machine's: set one of them, or ages and audit rows mislead"
        yield Finding(Verdict.NOTE, subject, what)
