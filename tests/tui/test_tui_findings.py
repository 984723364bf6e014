"""Alerts and advice, each proved by a situation that provokes it and one that doesn't, on the real scheduler."""

import pytest
from screen_watch import Watch, findings_of

from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.snapshot import LimitedBy
from schedtop.tui.advisor import find
from schedtop.tui.alerts import find_alerts
from schedtop.tui.cells import plain
from schedtop.tui.state import Scene
from schedtop.tui.views.decisions import decisions
from schedtop.tui.views.overview import kv_line, preempted_line, sequences_line
from schedtop.tui.views.requests import requests


def alerts_of(scene: Scene) -> str:
    return "\n".join(alert.text for alert in find_alerts(scene))


def apply(scene: Scene, watch: Watch, name: str) -> None:
    """Do what a finding proposes; the engine must take it."""
    changes = findings_of(scene)[name].changes
    assert changes
    watch.link.core.set_knobs(changes)


def test_an_idle_engine_raises_neither_alert_nor_advice(new_link) -> None:
    scene = Watch(new_link()).look()
    assert find_alerts(scene) == []
    assert find(scene) == []


def storm(new_link, send, num_kv_blocks: int) -> Watch:
    link = new_link(num_kv_blocks=num_kv_blocks, max_num_seqs=16, max_num_batched_tokens=2048)
    for i in range(16):
        send(link, f"r{i}", 64, 600)
    return Watch(link)


def test_thrash_is_shown_with_preemptions_and_tokens_thrown_away(new_link, send) -> None:
    """A11: preemptions per second and tokens thrown away, not just a full pool."""
    watch = storm(new_link, send, num_kv_blocks=81)
    scene = watch.look(500)
    assert scene.view.snapshot.counters.preemptions > 10
    assert "THRASH" in alerts_of(scene)
    line = plain(preempted_line(scene, scene.view.snapshot, 80))
    assert "tokens lost" in line
    assert line.rstrip().endswith("/s")
    assert "preemption storm" in findings_of(scene)


def test_a_pool_that_fits_all_raises_no_storm(new_link, send) -> None:
    scene = storm(new_link, send, num_kv_blocks=1000).look(500)
    assert "THRASH" not in alerts_of(scene)
    assert "preemption storm" not in findings_of(scene)


def test_following_the_storm_advice_makes_preemptions_rarer(new_link, send) -> None:
    followed, ignored = storm(new_link, send, 81), storm(new_link, send, 81)
    scene = followed.look(300)
    ignored.look(300)
    before = scene.view.snapshot.counters.preemptions
    for _ in range(6):
        advice = findings_of(scene).get("preemption storm")
        if advice:
            followed.link.core.set_knobs(advice.changes)
        scene = followed.look(150)
    after = scene.view.snapshot.counters.preemptions - before
    assert after < (ignored.look(900).view.snapshot.counters.preemptions - before) / 2


def blocked_head(new_link, send, **knobs) -> Watch:
    """A22: a big request that doesn't fit, eight small ones behind it that would."""
    link = new_link(num_kv_blocks=41, max_num_batched_tokens=1024, knobs=knobs)
    send(link, "r0", 256, 64)
    link.play(1)
    send(link, "big", 512, 8)
    for i in range(8):
        send(link, f"small{i}", 32, 8)
    return Watch(link)


def test_a_blocked_head_is_named_with_what_it_needs_and_who_waits_behind_it(new_link, send) -> None:
    watch = blocked_head(new_link, send)
    scene = watch.look(4)
    text = alerts_of(scene)
    assert "head blocked by KV: big needs 32 blocks" in text
    assert "8 wait behind it" in text
    table = "\n".join(plain(line) for line in requests(scene, 140, 20).lines)
    assert "behind big" in table
    apply(scene, watch, "head of line")
    assert watch.look(8).view.snapshot.num_waiting < 9


def test_with_admission_skip_nobody_is_told_to_switch_it_on(new_link, send) -> None:
    scene = blocked_head(new_link, send, admission="skip").look(4)
    assert "head of line" not in findings_of(scene)


def test_running_and_waiting_are_the_schedulers_own_numbers(new_link, send) -> None:
    """A47: one slot, ten requests."""
    link = new_link(max_num_seqs=1)
    for i in range(10):
        send(link, f"r{i}", 16, 50)
    scene = Watch(link).look(2)
    words = plain(sequences_line(scene, scene.view.snapshot, 120))
    assert words.startswith("running    1/1 ")
    assert "waiting 9    (9 sequence cap)" in words


def test_reasons_for_waiting_add_up_and_are_told_apart(new_link, send) -> None:
    """A49: held by an operator and waiting for room are two things."""
    link = new_link(max_num_seqs=2)
    for i in range(8):
        send(link, f"r{i}", 16, 50)
    link.play(1)
    link.core.hold(["r6", "r7"])
    scene = Watch(link).look(1)
    snapshot = scene.view.snapshot
    assert sum(snapshot.waiting_by_reason.values()) == snapshot.num_waiting == 6
    words = plain(sequences_line(scene, snapshot, 120))
    assert "4 sequence cap" in words
    assert "2 held by operator" in words


@pytest.mark.parametrize(
    ("sizes", "knobs", "limit", "name"),
    [
        ({"num_kv_blocks": 2001, "max_num_seqs": 64}, {"max_num_seqs": 2}, LimitedBy.SEQUENCES, "slot-limited"),
        ({"num_kv_blocks": 61, "max_num_seqs": 64}, {}, LimitedBy.BLOCKS, "KV-limited"),
        (
            {"num_kv_blocks": 4001, "max_num_seqs": 64, "max_num_batched_tokens": 2048},
            {"max_num_batched_tokens": 64},
            LimitedBy.BUDGET,
            "budget-limited",
        ),
    ],
)
def test_what_limits_the_engine_is_named_and_the_advice_names_the_right_knob(
    new_link, send, sizes, knobs, limit, name
) -> None:
    """A87: slots, KV and budget are told apart, from the scheduler's own record."""
    link = new_link(**sizes, knobs=knobs)
    for i in range(48):
        send(link, f"r{i}", 256, 64)
    watch = Watch(link)
    scene = watch.look(8)
    assert scene.view.snapshot.last_step.limited_by is limit
    finding = findings_of(scene)[name]
    if knobs:
        (knob,) = knobs
        assert finding.changes[knob] > knobs[knob]
        apply(scene, watch, name)
    else:
        assert not finding.changes, "no knob makes the pool larger"


def test_a_long_prompt_that_starves_decodes_is_found_and_the_cap_helps(new_link, send) -> None:
    def mixed(threshold: int) -> Watch:
        link = new_link(
            num_kv_blocks=4001, max_num_batched_tokens=2048, max_model_len=None,
            knobs={"long_prefill_token_threshold": threshold},
        )  # fmt: skip
        for i in range(4):
            send(link, f"chat{i}", 32, 900)
        link.play(60)
        send(link, "long", 24_000, 8)
        return Watch(link)

    watch = mixed(0)
    scene = watch.look(8)
    finding = findings_of(scene)["long prompt starves decodes"]
    capped = mixed(int(finding.changes["long_prefill_token_threshold"]))
    worst = capped.look(8).view.update.latencies["itl"].now.p99
    assert worst < scene.view.update.latencies["itl"].now.p99 / 2
    assert "long prompt starves decodes" not in findings_of(capped.look(4))


def test_a_stalled_engine_is_told_and_a_paused_or_idle_one_is_not(new_link, send) -> None:
    link = new_link()
    send(link, "r0", 16, 50)
    watch = Watch(link)
    watch.look(4)
    link.clock.advance(4.0)
    scene = watch.look(0)
    assert "STALLED: 1 running, 0 waiting, but the last step ended 4.0 s ago" in alerts_of(scene)
    assert "stalled engine" in findings_of(scene)
    link.core.pause("keep")
    assert "STALLED" not in alerts_of(watch.look(0))


def test_a_budget_below_the_number_running_is_found(new_link, send) -> None:
    link = new_link()
    for i in range(8):
        send(link, f"r{i}", 16, 100)
    watch = Watch(link)
    watch.look(8)
    link.core.set_knobs({"max_num_batched_tokens": 4})
    scene = watch.look(4)
    apply(scene, watch, "starved decodes")
    assert "starved decodes" not in findings_of(watch.look(4))


def ask_in_turn(watch: Watch, prefixes: int, rounds: int) -> Scene:
    """Short questions behind `prefixes` long shared beginnings, one after the other."""
    link = watch.link
    for number in range(rounds):
        tokens = [1000 + number % prefixes] * 320 + [number] * 16
        link.core.add_request(f"q{prefixes}-{number}", tokens, SamplingParams(max_tokens=2, ignore_eos=True))
        scene = watch.look(8)
    return scene


def test_prefixes_that_push_each_other_out_are_cache_thrash(new_link) -> None:
    watch = Watch(new_link(num_kv_blocks=129))
    scene = ask_in_turn(watch, prefixes=4, rounds=40)
    assert "cache thrash" not in findings_of(scene)
    watch.link.clock.advance(60.0)
    scene = ask_in_turn(watch, prefixes=12, rounds=36)
    finding = findings_of(scene)["cache thrash"]
    assert not finding.changes, "no knob makes the pool larger"
    counters = scene.view.snapshot.counters
    assert counters.cache_evictions > scene.view.snapshot.pool.usable
    assert "of prompt tokens found in the cache, 86% before" in finding.evidence


def test_a_pool_that_holds_all_prefixes_does_not_thrash(new_link) -> None:
    watch = Watch(new_link(num_kv_blocks=1001))
    ask_in_turn(watch, prefixes=4, rounds=40)
    watch.link.clock.advance(60.0)
    assert "cache thrash" not in findings_of(ask_in_turn(watch, prefixes=12, rounds=36))


def test_prompts_that_share_nothing_evict_without_being_called_thrash(new_link, send) -> None:
    watch = Watch(new_link(num_kv_blocks=129))
    for number in range(40):
        send(watch.link, f"r{number}", 320, 2)
        scene = watch.look(8)
    assert scene.view.snapshot.counters.cache_evictions > 128
    assert "cache thrash" not in findings_of(scene)


def reserved(new_link, send, max_tokens: int) -> Watch:
    link = new_link(num_kv_blocks=513, max_num_seqs=16, knobs={"reserve_output": True})
    for number in range(12):
        send(link, f"r{number}", 64, max_tokens)
    return Watch(link)


def test_room_set_aside_for_lengths_nobody_reaches_is_found_and_the_advice_lets_them_in(new_link, send) -> None:
    watch = reserved(new_link, send, max_tokens=3000)
    scene = watch.look(8)
    before = scene.view.snapshot.num_running
    apply(scene, watch, "over-provisioned context")
    scene = watch.look(8)
    assert scene.view.snapshot.num_running > 2 * before
    assert "over-provisioned context" not in findings_of(scene)


def test_room_set_aside_for_short_answers_is_no_finding(new_link, send) -> None:
    assert "over-provisioned context" not in findings_of(reserved(new_link, send, max_tokens=50).look(8))


def test_nothing_is_advised_on_stale_data(new_link, send) -> None:
    scene = blocked_head(new_link, send).look(4)
    assert find(scene)
    assert find(Scene(scene.view, now=scene.now + 10)) == []


def test_the_preemption_log_names_victim_cause_and_cost(new_link, send) -> None:
    scene = storm(new_link, send, 81).look(300)
    newest = scene.view.snapshot.recent_preemptions[-1]
    line = plain(decisions(scene, 90, 10).lines[1])
    assert newest.victim in line
    assert str(newest.num_lost_tokens) in line
    assert (newest.beneficiary if newest.beneficiary != newest.victim else "itself") in line


def test_the_pool_size_shown_is_the_usable_one(new_link) -> None:
    """A3: one block of the pool is reserved, and no surface counts it."""
    scene = Watch(new_link(num_kv_blocks=5)).look()
    assert "of 4 blk" in plain(kv_line(scene, scene.view.snapshot, 110))
