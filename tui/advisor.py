"""Findings: what is wrong with how the engine runs, the evidence, and the knob that helps. Pure.

A finding is only made from numbers the engine published. Whoever applies it stages it first and sees old and new.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from schedtop.engine.knobs import KnobValue
from schedtop.engine.snapshot import LimitedBy, PauseState, Snapshot, StepRecord, WaitReason
from schedtop.tui.alerts import STALL_AFTER_S, head_blocked, stalled_for
from schedtop.tui.format import age, duration, percent, rate
from schedtop.tui.state import Scene, rates

STORM_PER_S = 0.5
GAP_RATIO = 3.0
FREE_SHARE_LOW = 0.1
FREE_SHARE_HIGH = 0.5
THRASH_WINDOW_S = 30.0
THRASH_FROM_HITS, THRASH_TO_HITS = 0.3, 0.5
"""Hits thrash when the cache has served this share of its prompt tokens, and now serves less than this part of that."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of advice. `changes`: the knobs it would stage; empty when no knob helps."""

    name: str
    evidence: str
    advice: str
    changes: Mapping[str, KnobValue] = field(default_factory=dict)


def find(scene: Scene) -> list[Finding]:
    """All findings for the engine on screen, the most pressing first."""
    snapshot = scene.view.snapshot
    if snapshot is None or scene.is_stale:
        return []
    checks = (
        _stalled(scene, snapshot),
        _storm(scene, snapshot),
        _budget_below_running(snapshot),
        _head_blocked(snapshot),
        _starved_decodes(scene, snapshot),
        _overprovided(snapshot),
        _limited(scene, snapshot),
        _cache_thrash(scene, snapshot),
        _idle_drafts(snapshot),
    )
    return [finding for finding in checks if finding is not None]


def _stalled(scene: Scene, snapshot: Snapshot) -> Finding | None:
    if (for_s := stalled_for(scene, snapshot)) <= STALL_AFTER_S:
        return None
    return Finding(
        "stalled engine", f"work is pending, the last step ended {age(for_s)} ago", "look at the engine's log"
    )


def _storm(scene: Scene, snapshot: Snapshot) -> Finding | None:
    speed = rates(scene.view, scene.now)
    if speed is None or speed.preemptions < STORM_PER_S:
        return None
    fewer = max(1, snapshot.num_running - 1)
    evidence = f"{rate(speed.preemptions)} preemptions/s throw {rate(speed.lost)} tokens/s away"
    if snapshot.knobs.max_num_seqs > fewer and snapshot.num_running > 1:
        return Finding("preemption storm", evidence, "run fewer at once", {"max_num_seqs": fewer})
    return Finding("preemption storm", evidence, "admit only what fits to its end", {"reserve_output": True})


def _budget_below_running(snapshot: Snapshot) -> Finding | None:
    budget = snapshot.knobs.max_num_batched_tokens
    if budget >= snapshot.num_running:
        return None
    evidence = f"a budget of {budget} tokens for {snapshot.num_running} running: the newest get none"
    return Finding("starved decodes", evidence, "give each running request its token",
                   {"max_num_batched_tokens": snapshot.num_running})  # fmt: skip


def _head_blocked(snapshot: Snapshot) -> Finding | None:
    if not (words := head_blocked(snapshot)) or snapshot.knobs.admission == "skip":
        return None
    return Finding(
        "head of line", words.removeprefix("head blocked by KV: "), "let smaller ones pass", {"admission": "skip"}
    )


def _starved_decodes(scene: Scene, snapshot: Snapshot) -> Finding | None:
    """A long prompt slows every decode: nobody waits, KV is low, yet the gaps' p99 is far above their median."""
    itl = scene.view.update.latencies.get("itl") if scene.view.update else None
    step = snapshot.last_step
    if itl is None or itl.now is None or step is None or not step.num_decode_tokens:
        return None
    chunk = step.largest_prefill_chunk
    if itl.now.p99 < GAP_RATIO * itl.now.p50 or chunk < step.budget // 2 or chunk < 256:
        return None
    evidence = (
        f"token gaps p50 {duration(itl.now.p50)} p99 {duration(itl.now.p99)}; one prompt takes {chunk} of {step.budget}"
    )
    return Finding("long prompt starves decodes", evidence, "cap one prompt's share of a step",
                   {"long_prefill_token_threshold": max(128, chunk // 4)})  # fmt: skip


def _limited(scene: Scene, snapshot: Snapshot) -> Finding | None:
    """What keeps the waiting from starting: slots, KV or budget."""
    step = snapshot.last_step
    if step is None or snapshot.pause is not PauseState.RUNNING or not snapshot.num_waiting:
        return None
    match step.limited_by:
        case LimitedBy.SEQUENCES:
            return _slot_limited(scene, snapshot)
        case LimitedBy.BLOCKS:
            evidence = (
                f"{snapshot.num_waiting} wait for KV blocks, {snapshot.pool.free} of {snapshot.pool.usable} are free"
            )
            return Finding(
                "KV-limited", evidence, "more sequences or budget won't help; fewer or shorter contexts will"
            )
        case LimitedBy.BUDGET:
            return _budget_limited(scene, snapshot, step)
    return None


def _slot_limited(scene: Scene, snapshot: Snapshot) -> Finding:
    cap = snapshot.knobs.max_num_seqs
    used = percent(snapshot.pool.in_use, snapshot.pool.usable)
    running = snapshot.num_running
    slots = f"all {cap} slots run" if running <= cap else f"{running} running drain to the cap of {cap}"
    evidence = f"{slots}, {snapshot.num_waiting} wait, KV is {used} used"
    ceiling = _ceiling(scene, "max_num_seqs")
    has_room = snapshot.pool.free > snapshot.pool.usable * FREE_SHARE_LOW
    if ceiling is None or cap >= ceiling or not has_room:
        return Finding("slot-limited", evidence, "the cap is at its ceiling" if has_room else "KV has no room for more")
    return Finding(
        "slot-limited", evidence, "run more at once", {"max_num_seqs": min(int(ceiling), cap + max(1, cap // 4))}
    )


def _budget_limited(scene: Scene, snapshot: Snapshot, step: StepRecord) -> Finding:
    used = step.num_prefill_tokens + step.num_decode_tokens + step.num_draft_tokens
    evidence = f"{used} of {step.budget} tokens used in {duration(step.duration_s)}, {snapshot.num_waiting} wait"
    ceiling = _ceiling(scene, "max_num_batched_tokens")
    if ceiling is None or step.budget >= ceiling:
        return Finding("budget-limited", evidence, "the budget is at its ceiling")
    return Finding("budget-limited", evidence, "a larger budget starts them sooner, at longer token gaps",
                   {"max_num_batched_tokens": min(int(ceiling), step.budget * 2)})  # fmt: skip


def _overprovided(snapshot: Snapshot) -> Finding | None:
    """Somebody waits for blocks that are set aside for lengths which nobody reaches."""
    waiting = snapshot.waiting_by_reason.get(WaitReason.KV_BLOCKS, 0)
    pool = snapshot.pool
    if not (snapshot.knobs.reserve_output and waiting and pool.free > pool.usable * FREE_SHARE_HIGH):
        return None
    evidence = (
        f"{waiting} wait for KV blocks while {percent(pool.free, pool.usable)} of them are free: "
        "set aside for prompt + max_tokens"
    )
    return Finding("over-provisioned context", evidence, "admit by what is used; ask for smaller max_tokens",
                   {"reserve_output": False})  # fmt: skip


def _cache_thrash(scene: Scene, snapshot: Snapshot) -> Finding | None:
    """Prefixes that used to be found are given up before they are asked for again."""
    counters, pool = snapshot.counters, snapshot.pool
    since = scene.engine_now - THRASH_WINDOW_S
    recent = [sample for sample in scene.view.samples if sample.mono >= since]
    evicted = sum(sample.evictions for sample in recent)
    queries, hits = (sum(getattr(sample, name) for sample in recent) for name in ("cache_queries", "cache_hits"))
    older_queries, older_hits = counters.prefix_cache_queries - queries, counters.prefix_cache_hits - hits
    if evicted < pool.usable or not queries or older_hits < THRASH_FROM_HITS * older_queries or not older_queries:
        return None
    if hits * older_queries > THRASH_TO_HITS * older_hits * queries:
        return None
    evidence = (
        f"{evicted} cached blocks given up in {age(THRASH_WINDOW_S)} (pool {pool.usable}); "
        f"{percent(hits, queries)} of prompt tokens found in the cache, {percent(older_hits, older_queries)} before"
    )
    return Finding("cache thrash", evidence, "more prefixes than KV holds: give each engine its own, or enlarge KV")


def _idle_drafts(snapshot: Snapshot) -> Finding | None:
    counters = snapshot.counters
    if snapshot.knobs.num_speculative_tokens == 0 or counters.draft_tokens < 200:
        return None
    if counters.accepted_tokens > 0.2 * counters.draft_tokens:
        return None
    evidence = (
        f"{percent(counters.accepted_tokens, counters.draft_tokens)} of {counters.draft_tokens} draft tokens accepted"
    )
    return Finding("drafts don't pay", evidence, "switch them off", {"num_speculative_tokens": 0})


def _ceiling(scene: Scene, name: str) -> float | None:
    return next((spec.high for spec in scene.view.specs if spec.name == name), None)
