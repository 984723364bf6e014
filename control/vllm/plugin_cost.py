"""What the plugin costs vLLM's engine thread: `python -m schedtop.control.vllm.plugin_cost`, by a Python with vLLM.

vLLM's scheduler with and without the plugin, both settled in one process, step by turns: blocks of steps, so that
whatever else the machine does hits both alike. The model isn't there, so a share here is of the scheduler's work alone;
of a whole step, with its forward pass, it is smaller.
"""

import argparse
import gc
import os
import statistics
import tempfile
import time
from typing import Any

from schedtop.control.vllm.scheduler_alone import TimedScheduler, prepare

BLOCK_STEPS = 20
SETTLING_STEPS = 20
BLOCK_SIZE, PROMPT = 16, 64


def make_pair(num_running: int, num_waiting: int, is_async: bool, num_steps: int) -> tuple[Any, Any]:
    """vLLM's scheduler without and with the plugin, under the same requests."""
    prepare()
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from schedtop.control.vllm.plugin import SchedtopScheduler

    length = PROMPT + BLOCK_SIZE + num_steps + 2 * SETTLING_STEPS + 100
    settings = {
        "block_size": BLOCK_SIZE,
        "num_blocks": (num_running + 1) * (length // BLOCK_SIZE + 2),
        "max_num_batched_tokens": 8192,
        "max_num_seqs": num_running,
        "max_model_len": 4 * length,
        "async_scheduling": is_async,
    }
    workload = {
        "running": num_running,
        "waiting": num_waiting,
        "has_prefill": False,
        "has_churn": False,
        "is_async": is_async,
    }
    sizes = {
        "settings": settings,
        "prompt": PROMPT,
        "long_prompt": 0,
        "forever": 2 * length,
        "settling_steps": SETTLING_STEPS,
    }
    bare, controlled = (TimedScheduler(workload, sizes, kind) for kind in (AsyncScheduler, SchedtopScheduler))
    assert controlled.sched._engine is not None, "the plugin is off: its log tells why"
    return bare, controlled


def measure(pair: tuple[Any, Any], num_steps: int) -> tuple[list[float], list[float]]:
    """Seconds of the engine thread per step, without and with the plugin: a mean per block of steps."""
    blocks: tuple[list[float], list[float]] = ([], [])
    gc.disable()
    for number in range(num_steps // BLOCK_STEPS):
        order = (0, 1) if number % 2 else (1, 0)
        for which in order:
            blocks[which].append(statistics.fmean(pair[which].steps(BLOCK_STEPS)))
        gc.collect()
    gc.enable()
    return blocks


def snapshot_seconds(controlled: Any, times: int = 20) -> float:
    """What one look of a watcher (64 rows of either queue) costs the engine thread."""
    from schedtop.engine.snapshot import Viewport

    core = controlled.sched._core
    began = time.thread_time()
    for _ in range(times):
        core.snapshot(Viewport())
    return (time.thread_time() - began) / times


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--waiting", type=int, default=0)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--async", dest="is_async", action="store_true")
    parser.add_argument("--forward-ms", type=float, default=15.0, help="a forward pass to take the share of")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="st") as folder:
        os.environ["XDG_RUNTIME_DIR"] = os.environ["XDG_STATE_HOME"] = folder
        pair = make_pair(given.running, given.waiting, given.is_async, given.steps)
        bare, controlled = measure(pair, given.steps)
        look = snapshot_seconds(pair[1])
        pair[1].sched.shutdown()
    differences = [with_it - without for without, with_it in zip(bare, controlled, strict=True)]
    own, added = statistics.median(bare), statistics.median(differences)
    print(f"{given.running} running, {given.waiting} waiting, {'async' if given.is_async else 'sync'}, {given.steps} steps of each")
    print(f"vLLM's schedule + update: {own * 1e6:.0f} us a step, {own * 1e6 / given.running:.1f} us a request")
    print(f"the plugin adds: {added * 1e6:.0f} us a step, {added * 1e6 / given.running:.2f} us a request")
    print(f"= {100 * added / own:.1f} % of vLLM's scheduling, {100 * added / (own + given.forward_ms / 1e3):.2f} % of a step "
          f"with a forward pass of {given.forward_ms:g} ms")  # fmt: skip
    print(f"a watcher's look: {look * 1e6:.0f} us, four a second = {400 * look:.2f} % of the engine thread")


if __name__ == "__main__":
    main()
