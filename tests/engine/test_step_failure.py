"""A forward pass that breaks: its requests end with the error, nobody else notices, nothing wrong stays findable."""

from typing import Any

import pytest

from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.knobs import initial_knobs
from schedtop.engine.runner.fake import FakeRunner, hash_of_prefix
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.snapshot import FinishReason, Viewport

PROMPT = list(range(100, 164))


class BreakingRunner(FakeRunner):
    """Breaks, before it writes anything, in the steps (counted over those with tokens) that are named."""

    def __init__(self, breaks_in: set[int]) -> None:
        super().__init__()
        self.breaks_in = breaks_in
        self.num_busy_steps = 0

    def _run_step(self, scheduler_output: Any) -> Any:
        if scheduler_output.num_scheduled_tokens:
            self.num_busy_steps += 1
            if self.num_busy_steps in self.breaks_in:
                self._update_requests(scheduler_output)
                raise RuntimeError("kernel")
        return super()._run_step(scheduler_output)


def make_core(breaks_in: set[int], is_async: bool) -> EngineCore:
    config = EngineConfig(num_kv_blocks=33, max_num_batched_tokens=64, max_num_seqs=8)
    return EngineCore(
        config, BreakingRunner(breaks_in), initial_knobs(config, async_scheduling=is_async), clock=lambda: 0.0
    )


def add(core: EngineCore, request_id: str, prompt: list[int]) -> None:
    core.add_request(request_id, prompt, SamplingParams(max_tokens=4))


def run(core: EngineCore) -> tuple[dict[str, list[int]], dict[str, FinishReason]]:
    tokens: dict[str, list[int]] = {}
    ends: dict[str, FinishReason] = {}
    while core.has_work:
        done = core.step()
        assert core.self_check() == []
        for output in done.outputs if done else ():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                ends[output.request_id] = output.finish_reason
    return tokens, ends


def expected(prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(4):
        tokens.append(hash_of_prefix()(tokens))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_prefix_that_a_broken_step_should_have_computed_is_not_found(is_async: bool) -> None:
    core = make_core({1}, is_async)
    add(core, "breaks", PROMPT)
    assert run(core)[1] == {"breaks": FinishReason.ERROR}
    add(core, "later", [*PROMPT, 1])
    assert run(core)[0]["later"] == expected([*PROMPT, 1])
    assert core.snapshot(Viewport()).counters.prefix_cache_hits == 0


def test_two_requests_that_share_a_prefix_in_a_broken_step_leave_nothing_behind() -> None:
    core = make_core({1}, is_async=False)
    add(core, "a", PROMPT[:33])
    add(core, "b", [*PROMPT[:32], 1])
    assert run(core)[1] == {"a": FinishReason.ERROR, "b": FinishReason.ERROR}
    add(core, "later", [*PROMPT, 1])
    assert run(core)[0]["later"] == expected([*PROMPT, 1])


def test_a_request_that_built_on_a_broken_steps_blocks_starts_again_and_ends_right() -> None:
    core = make_core({1}, is_async=True)
    add(core, "breaks", PROMPT)
    add(core, "builds on it", [*PROMPT, 1])  # planned while the first step is in flight
    tokens, ends = run(core)
    assert ends == {"breaks": FinishReason.ERROR, "builds on it": FinishReason.LENGTH}
    assert tokens["builds on it"] == expected([*PROMPT, 1])


@pytest.mark.parametrize("step", range(1, 8))
@pytest.mark.parametrize("is_async", [False, True])
def test_whatever_step_breaks_who_isnt_in_it_ends_right(step: int, is_async: bool) -> None:
    core = make_core({step}, is_async)
    prompts = {"a": PROMPT, "b": [*PROMPT, 1, 2], "c": [*PROMPT[:32], 3], "d": list(range(40))}
    for request_id, prompt in prompts.items():
        add(core, request_id, prompt)
    tokens, ends = run(core)
    assert ends.keys() == prompts.keys()
    for request_id, reason in ends.items():
        got = tokens.get(request_id, [])
        assert got == expected(prompts[request_id])[: len(got)]
        assert reason is FinishReason.ERROR or len(got) == 4
    assert core.snapshot(Viewport()).pool.free == 32
