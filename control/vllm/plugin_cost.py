"""What the plugin costs vLLM's engine thread: `python -m schedtop.control.vllm.plugin_cost`, by a Python with vLLM.

One scheduler, its hooks switched on and off by turns, a few steps each: whatever else the machine does, and where
things lie in memory, hits both alike. The model isn't there: a share of the scheduler's work alone is printed, and what
it is of a step with a forward pass.
"""

import argparse
import gc
import os
import statistics
import tempfile
import time
from typing import Any

from schedtop.control.vllm.scheduler_alone import TimedScheduler, prepare

BLOCK_STEPS = 4
SETTLING_STEPS = 20
BLOCK_SIZE, PROMPT = 16, 64


def make_controlled(num_running: int, num_waiting: int, is_async: bool, num_steps: int) -> Any:
    """vLLM's scheduler with the plugin, under load."""
    prepare()
    from schedtop.control.vllm.plugin import SchedtopScheduler

    length = PROMPT + BLOCK_SIZE + 2 * num_steps * (BLOCK_STEPS + 1) // BLOCK_STEPS + 2 * SETTLING_STEPS + 100
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
    controlled = TimedScheduler(workload, sizes, SchedtopScheduler)
    assert controlled.sched.schedtop is not None, "the plugin is off: its log tells why"
    return controlled


def measure(controlled: Any, num_steps: int) -> tuple[list[float], list[float]]:
    """Seconds of the engine thread of each step, without and with the plugin's hooks."""
    seconds: tuple[list[float], list[float]] = ([], [])
    hooks = controlled.sched.schedtop
    gc.disable()
    for number in range(num_steps // BLOCK_STEPS):
        for is_on in (number % 2 == 0, number % 2 == 1):
            controlled.sched.schedtop = hooks if is_on else None
            controlled.steps(1)  # the first one after a switch finds what it compares with gone
            seconds[is_on].extend(controlled.steps(BLOCK_STEPS))
    gc.enable()
    controlled.sched.schedtop = hooks
    return seconds


def snapshot_seconds(controlled: Any, times: int = 20) -> float:
    """What one look of a watcher (64 rows of either queue) costs the engine thread."""
    from schedtop.engine.snapshot import Viewport

    core = controlled.sched.schedtop.core
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
        timed = make_controlled(given.running, given.waiting, given.is_async, given.steps)
        without, with_it = measure(timed, given.steps)
        look = snapshot_seconds(timed)
        timed.sched.shutdown()
    own = statistics.median(without)
    added = statistics.median(with_it) - own
    mode = "async" if given.is_async else "sync"
    print(f"{given.running} running, {given.waiting} waiting, {mode}, medians of {len(without)} steps of each")
    print(f"vLLM's schedule + update: {own * 1e6:.0f} us a step, {own * 1e6 / given.running:.1f} us a request")
    print(f"the plugin adds: {added * 1e6:.0f} us a step, {added * 1e6 / given.running:.2f} us a request")
    part, step = 100 * added / own, 100 * added / (own + given.forward_ms / 1e3)
    print(f"= {part:.1f} % of vLLM's scheduling, {step:.2f} % of a step with a forward of {given.forward_ms:g} ms")
    print(f"a watcher's look: {look * 1e6:.0f} us, four a second = {400 * look:.2f} % of the engine thread")


if __name__ == "__main__":
    main()
