"""The command line's root: names every command and imports none until it is used."""

import click


@click.group()
def cli() -> None:
    """Eyes and hands for a running LLM inference engine."""
