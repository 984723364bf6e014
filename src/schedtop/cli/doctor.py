"""`schedtop doctor`: is this installation complete, and are the engines running here sound? Looks; repairs nothing."""

import asyncio
import importlib.metadata
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator

import click

from schedtop import __version__
from schedtop.cli.engine import connect_option, json_option, plain, say_json
from schedtop.control.diagnosis import Finding, Verdict, look_at_engine, look_at_machine
from schedtop.control.discovery import CONNECT_VARIABLE, discover
from schedtop.control.settings import ServeSettings
from schedtop.engine.errors import SchedtopError
from schedtop.engine.runner.loader.resolve import WHEEL_MODELS, resolve_model

CLIENT = ("textual", "msgspec", "aiohttp", "prometheus-client", "click", "pyyaml", "lark")
ENGINE = ("torch", "tokenizers", "safetensors", "gguf", "xgrammar")


@click.command()
@connect_option
@json_option
def doctor(connect: str | None, as_json: bool) -> None:
    """Check an installation and the running engines; exit status 1 if something is bad."""
    findings = [*_installation(), *look_at_machine(ServeSettings().port), *_engines(connect)]
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


def _engines(connect: str | None) -> Iterator[Finding]:
    named = connect or os.environ.get(CONNECT_VARIABLE)
    targets = [named] if named else discover()
    if not targets:
        yield Finding(Verdict.NOTE, "engines", "none is running here; `schedtop demo` or `schedtop serve` starts one")
    for target in targets:
        yield from asyncio.run(look_at_engine(target))
