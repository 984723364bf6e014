"""`schedtop conformance`: does our scheduler decide as vLLM's own did in a recorded trace?"""

import sys
from pathlib import Path

import click
import msgspec

from schedtop.engine.sim.conformance import first_difference, load, replay


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--records", is_flag=True, help="Our own records to stdout, a JSON line per file; verdicts to stderr.")
def conformance(files: tuple[Path, ...], records: bool) -> None:
    """Replay trace FILES and print `ok` or the first record that differs; exit status 1 if any does."""
    num_different = 0
    for path in files:
        try:
            trace_file = load(path)
        except msgspec.DecodeError as error:
            raise click.ClickException(f"{path} is no trace file: {error}") from None
        ours = replay(trace_file.trace)
        if trace_file.expect is None:
            click.echo(f"{path}: nothing to compare with", err=records)
        else:
            difference = first_difference(ours, trace_file.expect)
            num_different += difference is not None
            click.echo(f"{path}: {difference or 'ok'}", err=records)
        if records:
            click.echo(msgspec.json.encode(ours))
    sys.exit(1 if num_different else 0)
