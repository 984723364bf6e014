"""What the plugin costs a real vLLM engine: `python -m schedtop.control.vllm.plugin_cost_real MODEL`, by vLLM's Python.

The engine core runs in this process and steps a real model; the plugin is switched on and off by turns, a few steps
each, its control thread included, so that what that takes of the GIL counts as well. Wall time: other work on the
machine widens the spread, and falls on both alike.
"""

import argparse
import gc
import os
import statistics
import tempfile
import time
from typing import Any

BLOCK_STEPS = 6
PROMPT = 32


def make_core(model: str, num_running: int, num_steps: int) -> Any:
    """vLLM's engine core with the plugin and `num_running` requests, all decoding."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CONFIGURE_LOGGING="0", VLLM_CPU_KVCACHE_SPACE="4")
    from vllm import EngineArgs, LLMEngine, SamplingParams

    length = 32 * -(-(PROMPT + num_steps + 80) // 32)
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=model, dtype="float32", enforce_eager=True, block_size=32, max_model_len=length,
            max_num_seqs=num_running, max_num_batched_tokens=8192, enable_prefix_caching=False,
            num_gpu_blocks_override=num_running * length // 32 + 2,
            scheduler_cls="schedtop.control.vllm.plugin.SchedtopScheduler",
        )
    )  # fmt: skip
    params = SamplingParams(max_tokens=length - PROMPT, ignore_eos=True, temperature=0)
    for i in range(num_running):
        engine.add_request(f"r{i}", {"prompt_token_ids": [5 + (i + j) % 200 for j in range(PROMPT)]}, params)
    core = engine.engine_core.engine_core
    while len(core.scheduler.running) < num_running or core.scheduler.waiting:
        core.step_fn()
    assert core.scheduler.schedtop is not None, "the plugin is off: its log tells why"
    core.keep = engine
    return core


def measure(core: Any, num_steps: int) -> tuple[list[list[float]], list[list[float]]]:
    """Wall and thread CPU seconds of each step, without and with the plugin: [wall, CPU] x [off, on]."""
    wall: list[list[float]] = [[], []]
    spent: list[list[float]] = [[], []]
    hooks = core.scheduler.schedtop
    gc.collect()
    gc.disable()
    for number in range(num_steps // (2 * (BLOCK_STEPS + 2))):
        for is_on in (number % 2 == 0, number % 2 == 1):
            core.scheduler.schedtop = hooks if is_on else None
            hooks.engine.is_idle = not is_on  # off: the control thread falls asleep
            for step in range(BLOCK_STEPS + 2):
                began, cpu = time.monotonic(), time.thread_time()
                core.step_fn()
                if step >= 2:  # the first ones find the caches cold and the other thread on its way
                    wall[is_on].append(time.monotonic() - began)
                    spent[is_on].append(time.thread_time() - cpu)
    gc.enable()
    core.scheduler.schedtop = hooks
    return wall, spent


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder")
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=800)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="st") as folder:
        os.environ["XDG_RUNTIME_DIR"] = os.environ["XDG_STATE_HOME"] = folder
        core = make_core(given.model, given.running, given.steps)
        wall, spent = measure(core, given.steps)
        core.scheduler.shutdown()
    print(f"{given.running} running, medians of {len(wall[0])} steps of each")
    for what, (off, on) in (("wall time", wall), ("CPU time of the engine thread", spent)):
        base = statistics.median(off)
        # Blocks that lie side by side are compared: what else the machine does changes slowly.
        pairs = [_median(on, place) - _median(off, place) for place in range(0, len(off), BLOCK_STEPS)]
        added = statistics.median(pairs)
        low, high = statistics.quantiles(pairs, n=4)[::2]
        print(f"{what}: {base * 1e3:.2f} ms a step without, {added * 1e6:+.0f} us with = {100 * added / base:+.2f} %")
        print(f"  (half of {len(pairs)} pairs of blocks lie between {low * 1e6:+.0f} and {high * 1e6:+.0f} us)")


def _median(seconds: list[float], place: int) -> float:
    return statistics.median(seconds[place : place + BLOCK_STEPS])


if __name__ == "__main__":
    main()
