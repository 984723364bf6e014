"""`schedtop doctor`: is this installation complete, and are the engines running here sound? Looks; repairs nothing."""

import asyncio
import importlib.metadata
import importlib.util
import shutil
import stat
import sys
from collections.abc import Iterator
from enum import StrEnum

import click
import msgspec

from schedtop import __version__
from schedtop.cli.engine import connect_option, json_option, plain, say_json
from schedtop.control.client import Client
from schedtop.control.discovery import check_path_length, discover, resolve, socket_folder, socket_path
from schedtop.control.messages import Ack, GetSnapshot, SelfCheck, SnapshotReply
from schedtop.engine.errors import SchedtopError
from schedtop.engine.runner.loader.resolve import WHEEL_MODELS, resolve_model

CLIENT = ("textual", "msgspec", "aiohttp", "prometheus-client", "click", "pyyaml", "lark")
ENGINE = ("torch", "tokenizers", "safetensors", "gguf", "xgrammar")
STALL_S = 10.0
"""With work pending, a last step older than this is worth a warning."""


class Verdict(StrEnum):
    """How a finding is meant."""

    OK = "ok"
    NOTE = "note"
    """Something is absent that isn't needed for everything."""
    BAD = "BAD"


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at."""

    verdict: Verdict
    subject: str
    detail: str


@click.command()
@connect_option
@json_option
def doctor(connect: str | None, as_json: bool) -> None:
    """Check an installation and the running engines; exit status 1 if something is bad."""
    findings = [*_installation(), *_folders(), *_engines(connect)]
    if as_json:
        say_json(findings)
    else:
        for finding in findings:
            click.echo(f"{finding.verdict:4}  {finding.subject}: {plain(finding.detail)}")
    sys.exit(any(finding.verdict is Verdict.BAD for finding in findings))


def _installation() -> Iterator[Finding]:
    yield Finding(Verdict.OK, "schedtop", f"{__version__}, Python {sys.version.split()[0]}")
    yield _packages("client packages", CLIENT, Verdict.BAD, "pip install schedtop")
    yield _packages("engine packages", ENGINE, Verdict.NOTE, "needed to serve models: pip install 'schedtop[engine]'")
    for name in WHEEL_MODELS:
        try:
            yield Finding(Verdict.OK, f"built-in model {name}", str(resolve_model(name)))
        except SchedtopError as error:
            yield Finding(Verdict.NOTE, f"built-in model {name}", str(error))
    if importlib.util.find_spec("schedtop.kernels._paged_attention"):
        yield Finding(Verdict.OK, "compiled attention kernel", "built")
    else:
        why = "no C++ compiler is here" if shutil.which("c++") is None else "it wasn't built: reinstall"
        yield Finding(Verdict.NOTE, "compiled attention kernel", f"missing, torch's own is used on the CPU: {why}")


def _packages(subject: str, names: tuple[str, ...], verdict: Verdict, advice: str) -> Finding:
    found, missing = [], []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        return Finding(verdict, subject, f"missing {', '.join(missing)}; {advice}")
    return Finding(Verdict.OK, subject, ", ".join(found))


def _folders() -> Iterator[Finding]:
    folder = socket_folder()
    try:
        check_path_length(socket_path("a-name-of-usual-length"))
    except SchedtopError as error:
        yield Finding(Verdict.BAD, "socket folder", str(error))
        return
    if not folder.exists():
        yield Finding(Verdict.OK, "socket folder", f"{folder} (made when an engine starts)")
    elif mode := stat.S_IMODE(folder.stat().st_mode) & 0o077:
        yield Finding(Verdict.BAD, "socket folder", f"{folder} is open to others ({mode:03o}): chmod 700 {folder}")
    else:
        yield Finding(Verdict.OK, "socket folder", f"{folder}, only for you")


def _engines(connect: str | None) -> Iterator[Finding]:
    targets = [resolve(connect)] if connect else discover()
    if not targets:
        yield Finding(Verdict.NOTE, "engines", "none is running here; `schedtop demo` or `schedtop serve` starts one")
    for target in targets:
        try:
            yield asyncio.run(_examine(target))
        except SchedtopError as error:
            yield Finding(Verdict.BAD, f"engine at {target}", str(error))


async def _examine(target: str) -> Finding:
    """Talk to an engine: is its accounting sound, does it move?"""
    async with await Client.connect(target, name="doctor") as client:
        reply, check = await client.request(GetSnapshot()), await client.request(SelfCheck())
        assert isinstance(reply, SnapshotReply) and isinstance(check, Ack)
        info, snapshot = client.welcome.info, reply.update.snapshot
    subject = f"engine {info.name}"
    if faults := check.data.get("faults"):
        return Finding(Verdict.BAD, subject, "; ".join(faults))
    is_busy = snapshot.num_running + snapshot.num_waiting > 0
    age_s = snapshot.mono - snapshot.last_step_mono if snapshot.last_step_mono is not None else 0.0
    if is_busy and snapshot.pause == "running" and age_s > STALL_S:
        return Finding(Verdict.BAD, subject, f"work is pending, but the last step ended {age_s:.0f} s ago")
    load = f"{snapshot.num_running} running, {snapshot.num_waiting} waiting, step {snapshot.step}"
    return Finding(Verdict.OK, subject, f"{info.model} on {info.backend}; {load}; block accounting is sound")
