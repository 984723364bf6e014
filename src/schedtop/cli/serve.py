"""`schedtop serve`: options on top of a settings file. What happens then is in `control/serve.py`."""

import logging
import sys
from pathlib import Path
from typing import Any

import click

from schedtop.cli.values import ADAPTER_ASSIGNMENT, KNOB_ASSIGNMENT, as_changes
from schedtop.control.settings import load_settings


@click.command(epilog="All of this, under the same names with underscores, can stand in the --config file (TOML).")
@click.option("--config", type=click.Path(dir_okay=False, path_type=Path), help="Settings file; options override it.")
@click.option("--name", help="Engine name: names the socket, and the engine in lists. [schedtop]")
@click.option("--runner", type=click.Choice(["real", "fake", "simulated"]), help="real = a model. [real]")
@click.option("--model", metavar="MODEL", help="GGUF file, model folder, hub id or smollm2. [smollm2]")
@click.option("--served-model-name", metavar="NAME", help="The model's name towards clients.")
@click.option("--dtype", help="auto, fp32, fp16, bf16: precision of weights and KV cache. [auto]")
@click.option("--device", help="auto, cpu or cuda. [auto]")
@click.option("--attention", help="Attention backend. [auto]")
@click.option(
    "--lora", type=ADAPTER_ASSIGNMENT, multiple=True, metavar="NAME=FOLDER", help="Serve a PEFT adapter as model NAME."
)
@click.option("--max-adapters", type=int, help="Different adapters running at once. [all]")
@click.option("--threads", type=int, help="CPU threads of the model. [all cores]")
@click.option("--wait-policy", help="auto, active or passive: idle CPU threads spin or sleep. [auto]")
@click.option("--block-size", type=int, help="Tokens per KV block. [16]")
@click.option("--num-kv-blocks", type=int, help="KV blocks to allocate.")
@click.option("--kv-memory", metavar="SIZE", help="Memory for the KV cache instead, such as 512MiB.")
@click.option("--max-model-len", type=int, help="Longest context in tokens. [the model's, if the pool holds it]")
@click.option("--max-num-batched-tokens", type=int, help="Ceiling of a step's token budget. [2048]")
@click.option("--max-num-seqs", type=int, help="Ceiling of running requests. [64]")
@click.option("--max-num-speculative-tokens", type=int, help="Ceiling of draft tokens per step. [0]")
@click.option("--kv-store", metavar="STORE", help="Share KV through folder:PATH, redis://host:port/db, unix:///path.")
@click.option("--kv-namespace", metavar="NAME", help="Share only with engines of the same namespace.")
@click.option("--scheduler-cls", metavar="MODULE:CLASS", help="Another scheduler than ours.")
@click.option("--set", "knobs", type=KNOB_ASSIGNMENT, multiple=True, metavar="NAME=VALUE", help="Start a knob there.")
@click.option("--socket", metavar="PATH", help="Control socket. [NAME.sock in the runtime folder]")
@click.option("--audit", metavar="PATH", help="Audit log. [NAME.audit.sqlite in the state folder]")
@click.option("--gateway/--no-gateway", default=None, help="Also serve HTTP. [yes]")
@click.option("--host", help="Address of the gateway. [127.0.0.1]")
@click.option("--port", type=int, help="Port of the gateway. [8000]")
@click.option("--token-file", metavar="PATH", help="Tokens of the gateway.")
@click.option("--allowed-host", "allowed_hosts", multiple=True, metavar="NAME", help="Further name of the gateway.")
@click.option("--playbooks", metavar="FOLDER", help="Playbooks that the gateway's clients may start by name.")
@click.option("--drain", type=float, metavar="SECONDS", help="Time for running requests at the end. [30]")
@click.option("--explain-memory", is_flag=True, help="Say what the engine would hold in memory, and end.")
@click.option("--json", "as_json", is_flag=True, help="Tell who and where the engine is in one line of JSON.")
def serve(config: Path | None, explain_memory: bool, as_json: bool, **options: Any) -> None:
    """Run an engine, its control socket and its HTTP gateway, until SIGTERM or Ctrl-C."""
    from schedtop.control.build import explain_memory as memory_lines
    from schedtop.control.serve import serve as run

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    given = {name: value for name, value in options.items() if value not in (None, ())}
    for name in {"knobs", "lora"} & given.keys():
        given[name] = as_changes(given[name])
    if "allowed_hosts" in given:
        given["allowed_hosts"] = list(given["allowed_hosts"])
    settings = load_settings(config, given)
    if explain_memory:
        click.echo("\n".join(memory_lines(settings)))
        return
    sys.exit(run(settings, click.echo, as_json))
