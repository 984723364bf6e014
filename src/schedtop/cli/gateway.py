"""`schedtop gateway`: the HTTP side of a running engine, as a process of its own."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from schedtop.control.discovery import is_url, resolve, token_path
from schedtop.control.http.app import Gateway, GatewayConfig, running
from schedtop.control.http.auth import TokenSpec, is_loopback, load_token_file, local_token, tokens_from_environment
from schedtop.control.http.tokenizers import load_tokenizer
from schedtop.control.supervise import WRONG_SETTINGS
from schedtop.engine.errors import ConfigError


@click.command()
@click.option("--connect", metavar="SOCKET", help="Control socket of the engine; default: the one that is running.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind; beyond loopback needs tokens.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 = any free one.")
@click.option("--allowed-host", multiple=True, metavar="NAME", help="A further name clients may address us by.")
@click.option(
    "--token-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="TOML with [[token]] tables: name, token, scopes (infer, read, control), priority_min, priority_max.",
)
@click.option(
    "--playbooks", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of playbooks that clients may start by name, besides the shipped ones.",
)  # fmt: skip
@click.option("--drain", default=10.0, show_default=True, metavar="SECONDS", help="Time for live requests at the end.")
@click.option(
    "--stall-limit", default=60.0, show_default=True, metavar="SECONDS",
    help="/health fails when work is pending and no step has ended for so long.",
)  # fmt: skip
def gateway(
    connect: str | None, host: str, port: int, allowed_host: tuple[str, ...], token_file: Path | None,
    playbooks: Path | None, drain: float, stall_limit: float,
) -> None:  # fmt: skip
    """Serve OpenAI's API, metrics and the control API over HTTP.

    Inference is open on loopback unless a token file or SCHEDTOP_TOKEN is given. Control routes always need a token:
    the operator's own lies in a file beside the socket that only this user can read.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    target = resolve(connect)
    if is_url(target):
        raise click.UsageError(f"--connect {target} is a gateway already; give the engine's socket")
    with _wrong_settings_end_it():
        given = tokens(token_file)
        check_bind(host, given)
        own = local_token(token_path(Path(target)))
        config = GatewayConfig(
            target=target,
            host=host,
            port=port,
            allowed_hosts=allowed_host,
            tokens=[own, *given],
            is_open=not given,
            drain_limit_s=drain,
            stall_limit_s=stall_limit,
            playbooks=playbooks,
        )
        asyncio.run(_serve(Gateway(config, load_tokenizer)))


@contextlib.contextmanager
def _wrong_settings_end_it() -> Iterator[None]:
    """With one line, and a status that tells a supervisor not to try again."""
    try:
        yield
    except ConfigError as error:
        click.echo(f"schedtop: error: {error}", err=True)
        sys.exit(WRONG_SETTINGS)


def tokens(token_file: Path | None) -> list[TokenSpec]:
    """Tokens that an operator set up, from the file and the environment."""
    return [*(load_token_file(token_file) if token_file else ()), *tokens_from_environment(os.environ)]


def check_bind(host: str, given: list[TokenSpec]) -> None:
    """Raise `UsageError` for an address others can reach while nobody has set up tokens."""
    if not is_loopback(host) and not given:
        raise click.UsageError(
            f"--host {host} can be reached from other machines: give tokens with --token-file or SCHEDTOP_TOKEN, "
            "or bind 127.0.0.1"
        )


async def _serve(gateway: Gateway) -> None:
    """Until the first signal; a second one cuts what is still running."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with running(gateway):
        click.echo(f"gateway on {gateway.url}")
        await stop.wait()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, gateway.cut)
