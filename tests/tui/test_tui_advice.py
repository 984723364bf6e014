"""The advisor's staged fix really helps: each scenario with and without it, on the real scheduler in virtual time."""

from collections.abc import Callable
from typing import Any

import pytest
from screen_watch import Watch, findings_of

from schedtop.engine.runner.simulated import TOKEN, SimulatedRunner
from schedtop.engine.sched.output import ModelRunnerOutput, SchedulerOutput
from schedtop.engine.snapshot import LimitedBy

WRONG = TOKEN + 1


class DraftingRunner(SimulatedRunner):
    """Proposes four drafts for each request: all right, or all wrong. The scheduler takes as many as the knob says."""

    are_right = False

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """As the simulated runner, with right drafts taken over."""
        tried = scheduler_output.scheduled_spec_decode_tokens
        ids = list(scheduler_output.num_scheduled_tokens)
        sampled = super().execute_model(scheduler_output).sampled_token_ids
        if self.are_right:
            sampled = [
                [*[TOKEN] * len(tried.get(name, ())), *new] if new else new
                for name, new in zip(ids, sampled, strict=True)
            ]
        draft = TOKEN if self.are_right else WRONG
        proposed = {name: [draft] * 4 for name, new in zip(ids, sampled, strict=True) if new}
        return ModelRunnerOutput(sampled_token_ids=sampled, draft_token_ids=proposed)


class RightDrafts(DraftingRunner):
    """Its drafts are always right."""

    are_right = True


@pytest.fixture
def drafting(new_link, send) -> Callable[[type], Watch]:
    """An engine with eight long answers and four drafts per step."""

    def made(runner: type) -> Watch:
        link = new_link(num_kv_blocks=2001, max_num_speculative_tokens=4, runner=runner)
        for number in range(8):
            send(link, f"r{number}", 32, 2000)
        return Watch(link)

    return made


def after(watch: Watch, seconds: float) -> dict[str, Any]:
    """What the counters gained in some seconds of the engine's time."""
    link, counters = watch.link, watch.look().view.snapshot.counters
    end = link.clock() + seconds
    while link.clock() < end and link.core.has_work:
        watch.look(8)
    new = watch.look().view.snapshot.counters
    return {
        "generated": new.generated_tokens - counters.generated_tokens,
        "finished": sum(new.finished.values()) - sum(counters.finished.values()),
        "first_tokens": new.first_tokens - counters.first_tokens,
    }


def followed(watch: Watch, name: str, steps: int) -> Watch:
    """The engine after doing what the finding stages."""
    finding = findings_of(watch.look(steps))[name]
    assert finding.changes, f"{name} stages nothing"
    watch.link.core.set_knobs(finding.changes)
    return watch


def ignored(watch: Watch, steps: int) -> Watch:
    """The same engine, left alone."""
    watch.look(steps)
    return watch


def test_drafts_that_are_never_right_are_found_and_without_them_more_is_generated(drafting) -> None:
    with_drafts = after(ignored(drafting(DraftingRunner), 40), 2.0)
    without = after(followed(drafting(DraftingRunner), "drafts don't pay", 40), 2.0)
    assert without["generated"] > with_drafts["generated"]


def test_drafts_that_are_right_are_no_finding(drafting) -> None:
    scene = drafting(RightDrafts).look(40)
    assert scene.view.snapshot.counters.accepted_tokens > 200
    assert "drafts don't pay" not in findings_of(scene)


@pytest.fixture
def blocked_head(new_link, send) -> Callable[[], Watch]:
    """A big request that doesn't fit, eight small ones behind it that would."""

    def made() -> Watch:
        link = new_link(num_kv_blocks=41, max_num_batched_tokens=1024)
        send(link, "r0", 256, 300)
        link.play(1)
        send(link, "big", 512, 8)
        for number in range(8):
            send(link, f"small{number}", 32, 8)
        return Watch(link)

    return made


def test_passing_a_blocked_head_lets_the_small_ones_end_sooner(blocked_head) -> None:
    helped = after(followed(blocked_head(), "head of line", 4), 1.0)
    left = after(ignored(blocked_head(), 4), 1.0)
    assert left["finished"] == 0
    assert helped["finished"] == 8


@pytest.fixture
def few_slots(new_link, send) -> Callable[[], Watch]:
    """Two slots for 32 requests, with room for all."""

    def made() -> Watch:
        link = new_link(num_kv_blocks=2001, max_num_seqs=64, knobs={"max_num_seqs": 2})
        for number in range(32):
            send(link, f"r{number}", 64, 100)
        return Watch(link)

    return made


def test_more_slots_generate_more_where_slots_were_the_limit(few_slots) -> None:
    watch = few_slots()
    assert watch.look(8).view.snapshot.last_step.limited_by is LimitedBy.SEQUENCES
    left = after(ignored(few_slots(), 8), 2.0)
    helped = few_slots()
    while "slot-limited" in findings_of(helped.look(4)) and helped.view.snapshot.knobs.max_num_seqs < 16:
        followed(helped, "slot-limited", 0)
    gained = after(helped, 2.0)
    assert gained["generated"] > 2 * left["generated"]


def test_slots_for_all_are_no_finding(new_link, send) -> None:
    link = new_link(num_kv_blocks=2001, max_num_seqs=64)
    for number in range(32):
        send(link, f"r{number}", 64, 100)
    assert "slot-limited" not in findings_of(Watch(link).look(40))


@pytest.fixture
def small_budget(new_link, send) -> Callable[[], Watch]:
    """A budget of 64 tokens a step for 24 prompts of 256."""

    def made() -> Watch:
        link = new_link(num_kv_blocks=4001, max_num_seqs=64, max_num_batched_tokens=2048,
                        knobs={"max_num_batched_tokens": 64})  # fmt: skip
        for number in range(24):
            send(link, f"r{number}", 256, 40)
        return Watch(link)

    return made


def test_a_larger_budget_brings_first_tokens_sooner_where_the_budget_was_the_limit(small_budget) -> None:
    helped = after(followed(small_budget(), "budget-limited", 8), 0.4)
    left = after(ignored(small_budget(), 8), 0.4)
    assert helped["first_tokens"] > left["first_tokens"]


def test_a_budget_that_takes_all_prompts_at_once_is_no_finding(new_link, send) -> None:
    link = new_link(num_kv_blocks=4001, max_num_seqs=64, max_num_batched_tokens=8192)
    for number in range(24):
        send(link, f"r{number}", 256, 40)
    assert "budget-limited" not in findings_of(Watch(link).look(8))


@pytest.fixture
def reserving(new_link, send) -> Callable[[], Watch]:
    """Room set aside for answers of 3,000 tokens, of which nobody reaches the end within the test."""

    def made() -> Watch:
        link = new_link(num_kv_blocks=513, max_num_seqs=16, knobs={"reserve_output": True})
        for number in range(12):
            send(link, f"r{number}", 64, 3000)
        return Watch(link)

    return made


def test_admitting_by_what_is_used_generates_more_than_setting_room_aside(reserving) -> None:
    helped = after(followed(reserving(), "over-provisioned context", 8), 1.0)
    left = after(ignored(reserving(), 8), 1.0)
    assert helped["generated"] > 2 * left["generated"]


@pytest.fixture
def starving(new_link, send) -> Callable[[], Watch]:
    """Eight that decode on a budget of four tokens a step."""

    def made() -> Watch:
        link = new_link()
        for number in range(8):
            send(link, f"r{number}", 16, 400)
        watch = Watch(link)
        watch.look(8)
        link.core.set_knobs({"max_num_batched_tokens": 4})
        return watch

    return made


def test_a_token_for_each_running_request_ends_the_starvation_of_the_newest(starving) -> None:
    def newest_gained(watch: Watch) -> int:
        def of(scene) -> int:
            return next(row.num_output_tokens for row in scene.view.snapshot.running if row.request_id == "r7")

        return -of(watch.look()) + of(watch.look(40))

    assert newest_gained(ignored(starving(), 4)) == 0
    assert newest_gained(followed(starving(), "starved decodes", 4)) == 40


def test_kv_limited_says_that_no_knob_helps_and_a_roomy_pool_is_no_finding(new_link, send) -> None:
    def crowd(num_kv_blocks: int) -> dict:
        link = new_link(num_kv_blocks=num_kv_blocks, max_num_seqs=64)
        for number in range(24):
            send(link, f"r{number}", 256, 64)
        return findings_of(Watch(link).look(8))

    assert crowd(61)["KV-limited"].changes == {}
    assert "KV-limited" not in crowd(2001)
