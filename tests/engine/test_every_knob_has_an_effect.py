"""Every knob of the table, turned live under load, makes the engine do something else from then on.

`TRIALS` says from what to what and beside which other settings; a knob without an entry fails, and so does one whose
two values plan the same. That nothing changes before the knob is turned is checked too.
"""

import random

import pytest
from factories import make_config, prompt

from schedtop.engine.core import EngineCore
from schedtop.engine.errors import QueueFull
from schedtop.engine.knobs import KNOB_NAMES, initial_knobs
from schedtop.engine.runner.fake import FakeRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sim.clock import VirtualClock

NUM_STEPS = 150
TURNED_AT = 30
NUM_REQUESTS = 40

TRIALS = {
    "max_num_batched_tokens": (64, 16, {}),
    "max_num_seqs": (8, 2, {}),
    "long_prefill_token_threshold": (0, 16, {}),
    "long_prefill_token_threshold_adaptive": (False, True, {"long_prefill_token_threshold": 4}),
    "enable_chunked_prefill": (True, False, {}),
    "policy": ("fcfs", "priority", {}),
    "preempt_on_arrival": (False, True, {"policy": "priority"}),
    "victim": ("newest", "most_blocks", {"reserve_full_prompt": False}),
    "watermark": (0.0, 0.5, {}),
    "reserve_full_prompt": (True, False, {}),
    "reserve_output": (False, True, {}),
    "max_preemptions": (0, 1, {"reserve_full_prompt": False}),
    "admission": ("strict", "skip", {}),
    "max_bypass": (1000, 1, {"admission": "skip"}),
    "max_num_queued_reqs": (0, 1, {}),
    "max_num_queued_tokens": (0, 50, {}),
    "kv_block_limit": (0, 20, {}),
    "prefix_caching": (True, False, {}),
    "num_speculative_tokens": (3, 0, {}),
    "async_scheduling": (False, True, {}),
}


def run(seed, knobs, turned=None):
    """What an engine did in each step, and which requests it refused. `turned`: knobs to change at `TURNED_AT`."""
    config = make_config(40, max_num_batched_tokens=64, max_num_seqs=8, max_num_speculative_tokens=3)
    runner = FakeRunner(config.block_size, proposer=lambda tokens: [tokens[-1], 1, 2])
    core = EngineCore(config, runner, initial_knobs(config, **knobs), clock=VirtualClock())
    load, told = random.Random(seed), []
    arrivals = sorted(load.randrange(100) for _ in range(NUM_REQUESTS))
    for step in range(NUM_STEPS):
        if step == TURNED_AT and turned:
            core.set_knobs(turned)
        for number, at in enumerate(arrivals):
            if at == step:
                told.append((step, submit(core, load, number)))
        outputs = core.step()
        plan = core.scheduler.last_plan
        told.append((step, plan and plan.step, plan and dict(plan.num_scheduled_tokens), outputs and outputs.step))
    core.shutdown()
    return told


def submit(core, load, number):
    """Some prompts begin alike; lengths, priorities and lengths of answers vary."""
    tokens = prompt(load.choice([5, 40, 90, 200]), seed=number % 3 if number % 2 else number)
    sampling = SamplingParams(max_tokens=load.choice([2, 20, 60]), ignore_eos=True)
    try:
        core.add_request(f"r{number}", tokens, sampling, priority=load.randrange(4))
    except QueueFull:
        return f"r{number} refused"
    return f"r{number}"


@pytest.mark.parametrize("name", KNOB_NAMES)
def test_a_knob_turned_live_changes_what_the_engine_does_from_then_on(name):
    before, after, beside = TRIALS[name]
    for seed in range(6):
        left, turned = run(seed, {name: before, **beside}), run(seed, {name: before, **beside}, {name: after})
        assert [entry for entry in left if entry[0] < TURNED_AT] == [entry for entry in turned if entry[0] < TURNED_AT]
        if left != turned:
            return
    raise AssertionError(f"{name}: {before} and {after} make no difference")


def test_turning_a_knob_to_where_it_stands_changes_nothing():
    assert run(1, {}, {"max_num_seqs": 8}) == run(1, {})
