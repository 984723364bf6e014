"""`schedtop demo`: the built-in model under its own load, and the screen on it. Starts the parts; is none of them."""

import asyncio
import contextlib
import sys
import threading
from collections.abc import Iterator

import click
import msgspec

from schedtop.control.client import Client
from schedtop.control.demo import DemoLoad
from schedtop.control.demo_engine import DemoEngine
from schedtop.control.demo_headless import Summary, run_headless
from schedtop.control.errors import Disconnected
from schedtop.engine.runner.tokenizer import Tokenizer, load_tokenizer

DEFAULT_SECONDS = 30.0
DEFAULT_KV_BLOCKS = 81


@click.command()
@click.option("--headless", is_flag=True, help="Status lines and a summary instead of the screen.")
@click.option(
    "--seconds",
    type=click.FloatRange(1, 3600),
    help="How long, from the first step. [screen: until you leave; headless: 30]",
)
@click.option("--json", "as_json", is_flag=True, help="With --headless: the summary as JSON, nothing else.")
@click.option("--model", default="smollm2", show_default=True, help="As for `schedtop serve`.")
@click.option(
    "--num-kv-blocks",
    type=click.IntRange(64, 100_000),
    default=DEFAULT_KV_BLOCKS,
    show_default=True,
    help="A small pool, so that a queue and preemptions appear within seconds.",
)
@click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads of the model. [all cores]")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Of the HTTP gateway; another one if it is taken.",
)
@click.option("--theme", metavar="NAME|FILE", help="Colours of the screen.")
def demo(
    headless: bool, seconds: float | None, as_json: bool, model: str, num_kv_blocks: int, threads: int | None,
    port: int, theme: str | None,
) -> None:  # fmt: skip
    """Serve the built-in model under load and watch it: chats, now and then a long document, short questions behind.

    Headless (also without a terminal) it exits with 0 only if tokens were generated, somebody was preempted, and with
    the load ended no block is lost.
    """
    click.echo("starting an engine with the built-in model ...", err=True)
    with DemoEngine(*engine_options(model, num_kv_blocks, threads), port=port) as engine:
        if headless or as_json or not sys.stdout.isatty():
            summary = asyncio.run(_headless(engine, seconds or DEFAULT_SECONDS, is_quiet=as_json))
            _conclude(summary, as_json)
        else:
            with load_in_background(str(engine.socket)):
                from schedtop.cli.watch import run_screen

                run_screen([str(engine.socket)], read_only=False, theme=theme)


def engine_options(model: str, num_kv_blocks: int, threads: int | None) -> list[str]:
    """The demo's `schedtop serve` options: a small budget, so that prompts come in chunks one can see."""
    sizes = ["--num-kv-blocks", str(num_kv_blocks), "--max-num-batched-tokens", "256", "--max-num-seqs", "16"]
    return ["--model", model, *sizes, *(("--threads", str(threads)) if threads else ())]


async def _headless(engine: DemoEngine, seconds: float, is_quiet: bool) -> Summary:
    say = (lambda line: None) if is_quiet else click.echo
    async with (
        await Client.connect(str(engine.socket), name="demo watcher", read_only=True) as watcher,
        await Client.connect(str(engine.socket), name="demo load") as client,
    ):
        info = watcher.welcome.info
        say(f"{info.model} on {info.backend}; watch it from another terminal with: schedtop --connect {engine.socket}")
        load, tokenizer = make_load(client)
        return await run_headless(watcher, load, seconds, tokenizer.decode, say)


def make_load(client: Client) -> tuple[DemoLoad, Tokenizer]:
    """The load for the engine at the other end, and its model's tokenizer."""
    info = client.welcome.info
    tokenizer = load_tokenizer(info.model_path)

    def ask(text: str) -> list[int]:
        return tokenizer.apply_chat_template([{"role": "user", "content": text}])

    return DemoLoad(client, ask, max_prompt_tokens=info.num_usable_blocks * info.block_size // 2), tokenizer


def _conclude(summary: Summary, as_json: bool) -> None:
    problems = summary.problems()
    if as_json:
        click.echo(msgspec.json.encode({**msgspec.structs.asdict(summary), "problems": problems}).decode())
    else:
        click.echo(f"\n{summary}")
    if problems:
        raise click.ClickException("; ".join(problems))


@contextlib.contextmanager
def load_in_background(target: str) -> Iterator[None]:
    """The load in a thread with a loop of its own; it ends with the block."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(_keep_busy(target))
    thread = threading.Thread(target=lambda: _run_quietly(loop, task), name="demo-load")
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()


def _run_quietly(loop: asyncio.AbstractEventLoop, task: "asyncio.Task[None]") -> None:
    with contextlib.suppress(asyncio.CancelledError):
        loop.run_until_complete(task)


async def _keep_busy(target: str) -> None:
    """An engine that goes away is the screen's to report."""
    with contextlib.suppress(Disconnected):
        async with await Client.connect(target, name="demo load") as client:
            load, _ = make_load(client)
            await load.run()
