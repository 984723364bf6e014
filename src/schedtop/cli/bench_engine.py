"""`schedtop bench engine`: output tokens per second on a real model, beside peers on the same weights.

Like is compared with like: our engine in this process with transformers in this process, our server over HTTP with
other servers over HTTP. All alternate, with the same prompts.
"""

import secrets
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from schedtop.cli.values import Assignment

if TYPE_CHECKING:
    from schedtop.control.bench_servers import HttpServer
    from schedtop.engine.runner.bench import OurEngine, Step
    from schedtop.engine.runner.bench_load import Contender, Load, Round

MIN_OUTPUT_WITH_WAITING = 10
"""Output tokens below which no steps are left to compare."""

PAUSE_S = 1.5
"""Between servers' turns: vLLM's worker goes on spinning for a second after its last answer."""


class UrlAssignment(Assignment):
    """A peer's name and where it listens."""

    name = "NAME=URL"


class Servers(msgspec.Struct, frozen=True, kw_only=True):
    """The servers to compare ours with, and what they and ours are started with."""

    model: str
    dtype: str
    threads: int
    llama_server: str | None = None
    vllm_python: str | None = None
    peer_url: Sequence[tuple[str, str]] = ()

    def for_load(self, load: "Load", folder: Path) -> "Iterator[AbstractContextManager[HttpServer]]":
        """Ours first; none where no peer was named. Each is up inside its context."""
        from schedtop.control import bench_servers as servers

        if not (self.llama_server or self.vllm_python or self.peer_url):
            return
        yield servers.running(servers.schedtop_server(self.model, self.dtype, self.threads, load, folder))
        if self.llama_server:
            yield servers.running(servers.llama_server(self.llama_server, self.model, self.threads, load))
        if self.vllm_python:
            yield servers.running(servers.vllm_server(self.vllm_python, self._model_folder(folder), self.threads, load))
        for server in self.at_urls():
            yield nullcontext(server)

    def at_urls(self) -> "list[HttpServer]":
        """Those that are up already. Raises `ServerFailed` for one that isn't."""
        from schedtop.control.bench_servers import HttpServer

        return [HttpServer(name, url) for name, url in self.peer_url]

    def _model_folder(self, folder: Path) -> Path:
        from schedtop.engine.runner.bench import save_as_folder

        saved = folder / "model"
        return saved if saved.exists() else save_as_folder(self.model, saved)


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="Path, smollm2, or a hub id.")
@click.option("--concurrency", default=(16, 32), multiple=True, type=click.IntRange(1), show_default=True)
@click.option("--rounds", default=5, type=click.IntRange(1), show_default=True, help="Rounds of each, alternating.")
@click.option("--threads", default=2, type=click.IntRange(1), show_default=True, help="Threads of each.")
@click.option("--dtype", default="auto", show_default=True, help="Ours: auto, fp16 or fp32.")
@click.option("--prompt-tokens", default=200, type=click.IntRange(1), show_default=True)
@click.option("--output-tokens", default=64, type=click.IntRange(2), show_default=True)
@click.option("--peer/--no-peer", default=True, show_default=True, help="Alternate with transformers.")
@click.option("--llama-server", metavar="PATH", help="llama.cpp's llama-server: start it on the same GGUF file.")
@click.option("--vllm-python", metavar="PY", help="A Python that has vLLM: start its server.")
@click.option(
    "--peer-url", type=UrlAssignment(), multiple=True, metavar="NAME=URL",
    help="A server that is up, with this model and as many threads; OpenAI's API with token ids.",
)  # fmt: skip
@click.option(
    "--waiting", default=1000, type=click.IntRange(0), show_default=True,
    help="Also compare steps with so many waiting and with none; 0 = don't.",
)  # fmt: skip
@click.option("--seed", type=int, help="Of the prompts. [another each time, so that no server has seen them]")
def engine(
    concurrency: Sequence[int], rounds: int, prompt_tokens: int, output_tokens: int, peer: bool, waiting: int,
    seed: int | None, **named: object,
) -> None:  # fmt: skip
    """Output tokens per second, greedy, all requests at once; medians of alternating rounds.

    With any server named, ours is started too and compared with them over HTTP. At the end of each table: what waiting
    requests cost a step.
    """
    from schedtop.engine.runner.bench import OurEngine, Transformers
    from schedtop.engine.runner.bench_load import Load

    if waiting and output_tokens < MIN_OUTPUT_WITH_WAITING:
        raise click.BadParameter(
            f"{output_tokens} is too few to compare steps: {MIN_OUTPUT_WITH_WAITING} at least, or --waiting 0",
            param_hint="--output-tokens",
        )
    servers = msgspec.convert(named, Servers)
    servers.at_urls()  # a wrong one is told before anything large is loaded
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    loads = [Load(concurrency=count, prompt_tokens=prompt_tokens, output_tokens=output_tokens) for count in concurrency]
    ours = OurEngine(servers.model, servers.dtype, servers.threads, max(loads, key=lambda load: load.concurrency))
    local: list[Contender] = [ours, Transformers(servers.model, servers.threads)] if peer else [ours]
    how = f"{servers.threads} threads, attention {ours.info.backend}, {ours.info.dtype}, seed {seed}"
    click.echo(f"model {servers.model}, {how}")
    with tempfile.TemporaryDirectory(prefix="schedtop-bench-") as folder:
        for load in loads:
            click.echo(
                f"\n{load.concurrency} requests of {prompt_tokens} + {output_tokens} tokens, {rounds} rounds each"
            )
            for group in _measured(local, servers, load, rounds, ours.info.vocab_size, seed, Path(folder)):
                click.echo("\n".join(report(group)))
            if waiting:
                click.echo(_waiting(ours, load, waiting, seed))


def _measured(
    local: "Sequence[Contender]", servers: Servers, load: "Load", rounds: int, vocab_size: int, seed: int, folder: Path
) -> "Iterator[dict[str, list[Round]]]":
    """Alternate all of them; yields the results of those in this process, then of those over HTTP."""
    from schedtop.engine.runner.bench_load import alternate

    with ExitStack() as stack:
        remote = [stack.enter_context(server) for server in servers.for_load(load, folder)]
        pause_s = PAUSE_S if remote else 0.0
        results = alternate([*local, *remote], load, rounds, vocab_size=vocab_size, seed=seed, pause_s=pause_s)
    for group in (local, remote):
        if group:
            yield {contender.name: results[contender.name] for contender in group}


def report(results: "dict[str, list[Round]]") -> list[str]:
    """A line per contender, the first one's ratio to each of the others, and where its time went."""
    medians = {name: statistics.median(r.tokens_per_s for r in rounds) for name, rounds in results.items()}
    first, *others = medians
    lines = []
    for name, rounds in results.items():
        speeds = [r.tokens_per_s for r in rounds]
        lines.append(f"  {name:28} {medians[name]:8.1f} tokens/s   {min(speeds):.1f} to {max(speeds):.1f}")
    for name in others:
        alike = _alike(results[first], results[name])
        lines.append(f"  {first} is {medians[first] / medians[name]:.2f} x {name}; answers alike for {alike:.0%}")
    if results[first][0].split:
        lines.append(_split_line(results[first]))
    return lines


def _alike(ours: "Sequence[Round]", theirs: "Sequence[Round]") -> float:
    """How much of an answer comes before the first difference, as a share: the mean over all answers.

    Less than all of it is to be expected of other precisions; hardly anything would mean other prompts or sampling.
    """
    rounds = zip(ours, theirs, strict=True)
    pairs = [pair for one, other in rounds for pair in zip(one.answers, other.answers, strict=True)]
    return statistics.fmean(_num_alike(one, other) / max(len(one), 1) for one, other in pairs)


def _num_alike(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _split_line(rounds: "Sequence[Round]") -> str:
    """The mean step, by what it was spent on; medians over rounds."""
    shares = {
        what: statistics.median(r.split[what] / sum(r.split.values()) for r in rounds) for what in rounds[0].split
    }
    step_s = statistics.median(sum(r.split.values()) / r.num_steps for r in rounds)
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{what} {share * step_s * 1e3:.2f} ms ({share:.1%})" for what, share in ordered)
    return f"  its step of {step_s * 1e3:.1f} ms on average: {parts}"


def _waiting(ours: "OurEngine", load: "Load", num_waiting: int, seed: int) -> str:
    prompts = load.prompts(ours.info.vocab_size, f"{seed} {load.concurrency} waiting")
    return waiting_line(load.concurrency, ours.steps_with_waiting(prompts, load.output_tokens, num_waiting))


def waiting_line(num_running: int, steps: "dict[int, list[Step]]") -> str:
    """Medians of the steps without and with requests waiting, and of what of them isn't the model's."""
    whole = [statistics.median(step.seconds for step in of) for of in steps.values()]
    scheduling = [statistics.median(step.scheduling_s for step in of) for of in steps.values()]
    none, many = steps
    return (
        f"  a step of {num_running} decodes: {whole[0] * 1e3:.2f} ms with {none} waiting, {whole[1] * 1e3:.2f} ms with "
        f"{many:,} ({whole[1] / whole[0]:.2f} x); of it scheduling and bookkeeping {scheduling[0] * 1e3:.3f} ms and "
        f"{scheduling[1] * 1e3:.3f} ms"
    )
