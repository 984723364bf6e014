"""`schedtop audit`: who changed what, when, why, and how it ended."""

import datetime
from pathlib import Path
from typing import Any

import click

from schedtop.cli.engine import ask, connect_option, json_option, plain, say_json
from schedtop.control.audit import read_audit_file
from schedtop.control.messages import Ack, GetAudit


@click.command()
@click.option("--limit", type=click.IntRange(1, 10_000), default=20, show_default=True, help="Newest entries shown.")
@click.option(
    "--file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Read this audit log instead of asking an engine; none needs to run.",
)
@connect_option
@json_option
def audit(limit: int, file: Path | None, connect: str | None, as_json: bool) -> None:
    """Show the audit log, oldest of the shown entries first."""
    if file is not None:
        rows = read_audit_file(file, limit)
    else:
        ack = ask(connect, GetAudit(limit=limit))
        assert isinstance(ack, Ack)
        rows = ack.data["rows"]
    if as_json:
        say_json(rows)
        return
    for row in reversed(rows):
        click.echo(_in_words(row))


def _in_words(row: dict[str, Any]) -> str:
    when = datetime.datetime.fromtimestamp(row["wall"]).astimezone().isoformat(sep=" ", timespec="seconds")
    who = row["client"] if row["uid"] is None else f"{row['client']} (uid {row['uid']})"
    if row["on_behalf_of"]:
        who = f"{row['on_behalf_of']} via {who}"
    text = f"{when}  #{row['id']}  step {row['step']}  {who}: {row['action']} {row['outcome']}"
    if row["change_id"]:
        text += f" [change {row['change_id']}]"
    if isinstance(row["before"], dict) and isinstance(row["after"], dict) and row["after"]:
        text += "  " + ", ".join(f"{name} {row['before'].get(name)} -> {value}" for name, value in row["after"].items())
    for part in (row["detail"], row["reason"] and f'reason: "{row["reason"]}"'):
        if part:
            text += f"  {part}"
    return plain(text)
