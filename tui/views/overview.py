"""The one-line strips: identity, alerts, budget, sequences, KV, latency, last action. Pure."""

from collections.abc import Sequence

from schedtop.engine.snapshot import PauseState, PoolUsage, Snapshot
from schedtop.tui.alerts import Alert
from schedtop.tui.cells import Line, Span, between, clean, fit, join, width_of
from schedtop.tui.format import UNKNOWN, age, bar, count, duration, percent, rate
from schedtop.tui.state import Outcome, Phase, Scene, rates

LATENCY_NAMES = ("ttft", "itl", "e2e", "queue", "step")
SHORT_REASONS = {
    "KV blocks": "KV",
    "behind a blocked request": "behind",
    "sequence cap": "cap",
    "budget spent": "budget",
    "prompt exceeds budget": "prompt > budget",
    "admission stopped by a preemption": "after preemption",
    "grammar compiling": "grammar",
    "KV arriving": "KV load",
    "adapter slots full": "adapter",
    "encoder budget or cache": "encoder",
    "held by operator": "held",
    "preempted, result in flight": "in flight",
}
"""Wait reasons for where there is little room; those not named are short already."""


def identity(scene: Scene, width: int) -> Line:
    """Who is on screen, may it be changed, how old is what is shown."""
    view = scene.view
    left: list[Span] = [("schedtop ", "title_focus")]
    if view.welcome is None:
        left.append((f"→ {clean(view.target)}", "text"))
        return between(left, _freshness(scene), width)
    info = view.welcome.info
    left += [(clean(info.name), "strong"), (f" {clean(info.model)}", "text")]
    snapshot = view.snapshot
    if snapshot:
        left.append((f" · {snapshot.knobs.policy} · step {snapshot.step} · gen {snapshot.generation}", "dim"))
    if width >= 110:
        left.append((f" · {info.kind} {clean(info.version)} {clean(info.backend.split(',')[0])}".rstrip(), "dim"))
    return between(left, _freshness(scene), width)


def _freshness(scene: Scene) -> Line:
    parts: list[Sequence[Span]] = []
    if scene.ui.is_frozen:
        parts.append([("⏸ SCREEN PAUSED", "warn")])
    parts.append([("RO", "warn")] if scene.ui.is_read_only else [("RW", "dim")])
    if scene.ui.playback is not None:
        parts.append([("REPLAY", "warn")])
    if scene.view.phase is Phase.LOST:
        parts.append([("✗ GONE", "bad")])
    elif scene.ui.playback is not None:
        pass
    elif scene.view.phase is Phase.CONNECTING:
        parts.append([("… connecting", "dim")])
    elif scene.is_stale:
        parts.append([(f"stale, {age(scene.view.age(scene.now))} old", "warn")])
    else:
        parts.append([("● live", "good")])
    return (("  ", "text"), *join(parts), (" ", "text"))


def alert_strip(alerts: Sequence[Alert], width: int) -> Line:
    """As many alerts as fit, the worst first, and how many more there are; never empty."""
    if not alerts:
        return fit([("✓ no alerts", "dim")], width)
    shown: list[Span] = []
    for place, alert in enumerate(alerts):
        part = (f"{'   ' if place else ''}{alert.glyph} {alert.text}", alert.role)
        rest = len(alerts) - place
        if place and width_of([*shown, part]) > width - (9 if rest > 1 else 0):
            return between(shown, [(f" +{rest} more ", "dim")], width)
        shown.append(part)
    return fit(shown, width)


def budget_line(snapshot: Snapshot, width: int) -> Line:
    """`tok 1843/2048 [prefill|decode|unused]` and the step's time."""
    step = snapshot.last_step
    if step is None:
        return fit([("tok ", "dim"), (f"{UNKNOWN}/{snapshot.knobs.max_num_batched_tokens}  no step yet", "dim")], width)
    used = step.num_prefill_tokens + step.num_decode_tokens + step.num_draft_tokens
    left: list[Span] = [("tok ", "dim"), (f"{used:>5}", "strong"), (f"/{step.budget:<5} ", "text")]
    right: list[Span] = [
        (f" prefill {step.num_prefill_tokens:>5}", "prefill"),
        (f" decode {step.num_decode_tokens:>4}", "decode"),
        (f" {duration(step.duration_s):>8}", "strong"),
    ]
    room = width - sum(len(text) for text, _ in left + right)
    return fit([*left, *budget_bar(snapshot, max(4, room)), *right], width)


def budget_bar(snapshot: Snapshot, width: int) -> list[Span]:
    """The last step's budget as a bar: each part has its own glyph."""
    step = snapshot.last_step
    if step is None:
        return [("·" * width, "unused")]
    drafts = step.num_draft_tokens
    unused = max(0, step.budget - step.num_prefill_tokens - step.num_decode_tokens - drafts)
    return bar(
        [
            (step.num_prefill_tokens, "█", "prefill"),
            (step.num_decode_tokens, "▓", "decode"),
            (drafts, "▒", "draft"),
            (unused, "·", "unused"),
        ],
        width,
    )


def sequences_line(scene: Scene, snapshot: Snapshot, width: int) -> Line:
    """Who runs, who waits and why."""
    left: list[Span] = [
        ("run ", "dim"),
        (f"{snapshot.num_running:>3}", "running"),
        (f"/{snapshot.knobs.max_num_seqs:<4}", "text"),
        (" wait ", "dim"),
        (f"{count(snapshot.num_waiting):>4}", "waiting" if snapshot.num_waiting else "text"),
        *reasons(snapshot, is_short=width < 110),
    ]
    if snapshot.pause is not PauseState.RUNNING:
        left.append((" ⏸ PAUSED", "warn"))
    elif snapshot.last_step is not None:
        left.append((f"  limit: {snapshot.last_step.limited_by}", "dim"))
    speed = rates(scene.view, scene.now)
    return between(left, [(f" {rate(speed.generated if speed else None):>5} tok/s", "strong")], width)


def reasons(snapshot: Snapshot, is_short: bool = False) -> list[Span]:
    """`(9 KV blocks · 3 sequence cap)`, the most frequent first."""
    ranked = sorted(snapshot.waiting_by_reason.items(), key=lambda item: (-item[1], item[0]))
    names = SHORT_REASONS if is_short else {}
    words = " · ".join(f"{number} {clean(names.get(reason, reason))}" for reason, number in ranked if number)
    return [(f" ({words})", "waiting")] if words else []


def kv_counts(pool: PoolUsage) -> list[tuple[int, str, str, str]]:
    """Parts of the pool that add up to it: (blocks, glyph, role, word)."""
    return [
        (pool.in_use - pool.shared, "▓", "kv_used", "used"),
        (pool.shared, "█", "kv_shared", "shared"),
        (pool.held, "◇", "kv_held", "held"),
        (pool.pending, "○", "kv_pending", "pending"),
        (pool.cached, "░", "kv_cached", "cached"),
        (pool.free - pool.cached, "·", "kv_free", "free"),
    ]


def kv_line(scene: Scene, snapshot: Snapshot, width: int) -> Line:
    """The pool as a bar: in use, cached, free, and preemptions per second."""
    pool = snapshot.pool
    speed = rates(scene.view, scene.now)
    left: list[Span] = [("kv  ", "dim"), (f"{percent(pool.in_use, pool.usable):>5}", "strong"), (" used ", "dim")]
    right: list[Span] = [
        (f" {count(pool.in_use)}", "kv_used"),
        (f"+{count(pool.cached)} cached", "kv_cached"),
        (f" of {count(pool.usable)} blk", "dim"),
        ("  preempt ", "dim"),
        (f"{rate(speed.preemptions if speed else None)}/s", "preempted" if speed and speed.preemptions else "text"),
    ]
    room = width - sum(len(text) for text, _ in left + right)
    parts = [(float(amount), glyph, role) for amount, glyph, role, _ in kv_counts(pool)]
    return fit([*left, *bar(parts, max(4, room)), *right], width)


def latency_line(scene: Scene, width: int) -> Line:
    """p50/p99 of the last seconds, in one line."""
    latencies = scene.view.update.latencies if scene.view.update else {}
    parts: list[Sequence[Span]] = [[("p50/p99", "dim")]]
    for name in LATENCY_NAMES:
        values = latencies.get(name)
        now = values.now if values else None
        text = f"{short(now.p50)}/{short(now.p99)}" if now else UNKNOWN
        part: list[Span] = [(f"{name} ", "dim"), (text, "strong" if now else "dim")]
        if width_of(join([*parts, part])) <= width:
            parts.append(part)
    return fit(join(parts), width)


def short(seconds: float) -> str:
    """A duration without the space before its unit."""
    return duration(seconds).replace(" ", "")


def action_line(scene: Scene, width: int) -> Line:
    """The operator's last action and its acknowledgement."""
    if scene.ui.prompt is not None:
        rest = "   Enter keeps it, Esc clears it; !text shows what does not contain it"
        return fit([("filter ids: ", "key"), (clean(scene.ui.prompt) + "▏", "strong"), (rest, "dim")], width)
    action = scene.ui.action
    if action is None:
        hint = (
            "read-only: nothing can be changed from here" if scene.ui.is_read_only else "nothing changed from here yet"
        )
        return fit([(hint, "dim")], width)
    glyph, role = {
        Outcome.PENDING: ("…", "staged"),
        Outcome.DONE: ("✓", "good"),
        Outcome.REFUSED: ("✗", "bad"),
    }[action.outcome]
    word = "refused: " if action.outcome is Outcome.REFUSED else ""
    answer: list[Span] = [(f"{word}{clean(action.answer)}", role)] if action.answer else []
    what: list[Span] = [(f"{clean(action.what)}  ", "text")] if action.what else []
    return fit([(f"{glyph} ", role), *what, *answer], width)
