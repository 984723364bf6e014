"""`schedtop bench engine`: output tokens per second on a real model, beside transformers on the same weights."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from schedtop.engine.runner.bench import Round


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="Path, smollm2, or a hub id.")
@click.option("--concurrency", default=(16, 32), multiple=True, type=click.IntRange(1), show_default=True)
@click.option("--rounds", default=5, type=click.IntRange(1), show_default=True, help="Rounds of each, alternating.")
@click.option("--threads", default=2, type=click.IntRange(1), show_default=True, help="Threads of each.")
@click.option("--dtype", default="auto", show_default=True, help="Ours: auto, fp16 or fp32.")
@click.option("--prompt-tokens", default=200, type=click.IntRange(1), show_default=True)
@click.option("--output-tokens", default=64, type=click.IntRange(2), show_default=True)
@click.option("--peer/--no-peer", default=True, show_default=True, help="Alternate with transformers.")
def engine(
    model: str,
    concurrency: Sequence[int],
    rounds: int,
    threads: int,
    dtype: str,
    prompt_tokens: int,
    output_tokens: int,
    peer: bool,
) -> None:
    """Output tokens per second, greedy, all requests at once; medians of alternating rounds."""
    from schedtop.engine.runner.bench import Contender, Load, OurEngine, Transformers, alternate

    loads = [Load(concurrency=count, prompt_tokens=prompt_tokens, output_tokens=output_tokens) for count in concurrency]
    ours = OurEngine(model, dtype, threads, max(loads, key=lambda load: load.concurrency))
    contenders: list[Contender] = [ours, Transformers(model, threads)] if peer else [ours]
    click.echo(f"model {model}, {threads} threads, attention {ours.info.backend}, {ours.info.dtype}")
    for load in loads:
        click.echo(f"\n{load.concurrency} requests of {prompt_tokens} + {output_tokens} tokens, {rounds} rounds each")
        for line in report(alternate(contenders, load, rounds)):
            click.echo(line)


def report(results: "dict[str, list[Round]]") -> list[str]:
    """A line per contender, the ratio to the first, and where the first one's time went."""
    medians = {name: statistics.median(r.tokens_per_s for r in rounds) for name, rounds in results.items()}
    first, *others = medians
    lines = []
    for name, rounds in results.items():
        speeds = [r.tokens_per_s for r in rounds]
        lines.append(f"  {name:28} {medians[name]:8.1f} tokens/s   {min(speeds):.1f} to {max(speeds):.1f}")
    lines += [f"  {first} is {medians[first] / medians[name]:.2f} x {name}" for name in others]
    parts = results[first][0].split
    shares = {what: statistics.median(r.split[what] for r in results[first]) for what in parts}
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    lines.append("  its time: " + ", ".join(f"{what} {share:.0%}" for what, share in ordered))
    return lines
