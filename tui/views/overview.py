"""The one-line strips: identity, alerts, budget, sequences, KV, latency, last action. Pure."""

from collections.abc import Sequence

from schedtop.engine.snapshot import PauseState, PoolUsage, Preemption, RequestRow, Snapshot, WaitReason
from schedtop.tui.alerts import Alert
from schedtop.tui.cells import Line, Span, between, cell_len, clean, cut_id, fit, join, plain, width_of
from schedtop.tui.format import FILL, UNKNOWN, age, bar, count, duration, percent, rate
from schedtop.tui.state import PEAK_S, Outcome, Phase, Scene, peaks, rates

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


def _label(word: str) -> Span:
    """What stands in front of a strip."""
    return f"{word:<10}", "dim"


def budget_line(snapshot: Snapshot, width: int, label: str = "") -> Line:
    """`budget 1843/2048 tok [prefill|decode|unused]` and the step's time."""
    step = snapshot.last_step
    head: list[Span] = [_label(label)] if label else []
    if step is None:
        budget = snapshot.knobs.max_num_batched_tokens
        return fit([*head, (f"{UNKNOWN}/{budget}", "strong"), (" tokens a step, no step yet", "dim")], width)
    used = step.num_prefill_tokens + step.num_decode_tokens + step.num_draft_tokens
    left: list[Span] = [*head, (f"{used}/{step.budget}".ljust(11 if label else 0), "strong"), (" tok ", "dim")]
    right: list[Span] = [
        (f" prefill {step.num_prefill_tokens:>4}", "prefill"),
        (f" decode {step.num_decode_tokens:>3}", "decode"),
        (f" {duration(step.duration_s):>8}", "strong"),
    ]
    room = width - sum(len(text) for text, _ in left + right)
    return fit([*left, *budget_bar(snapshot, max(4, room)), *right], width)


def budget_bar(snapshot: Snapshot, width: int) -> list[Span]:
    """The last step's budget as a bar: each part has its own glyph."""
    step = snapshot.last_step
    if step is None:
        return [(FILL["unused"] * width, "unused")]
    amounts = {"prefill": step.num_prefill_tokens, "decode": step.num_decode_tokens, "draft": step.num_draft_tokens}
    amounts["unused"] = max(0, step.budget - sum(amounts.values()))
    return bar([(amount, FILL[role], role) for role, amount in amounts.items()], width)


def sequences_line(scene: Scene, snapshot: Snapshot, width: int) -> Line:
    """Who runs, who waits and why."""
    left: list[Span] = [
        ("running ", "dim"),
        (f"{snapshot.num_running:>4}", "running"),
        (f"/{snapshot.knobs.max_num_seqs:<4}", "strong"),
        (" waiting ", "dim"),
        (f"{count(snapshot.num_waiting):<4}", "waiting" if snapshot.num_waiting else "text"),
        *reasons(snapshot, is_short=width < 110),
        *_limit(snapshot),
    ]
    speed = rates(scene.view, scene.now)
    right: list[Span] = [(f" {rate(speed.generated if speed else None):>5} tok/s", "strong")]
    peak = _peak(scene, snapshot)
    if width_of([*left, *peak, *right]) <= width:
        left += peak
    return between(left, right, width)


def _peak(scene: Scene, snapshot: Snapshot) -> list[Span]:
    """Bursts that were over before this snapshot."""
    running, waiting = peaks(scene.view, scene.now)
    words = [f"{most} {name}" for most, now, name in ((running, snapshot.num_running, "running"),
             (waiting, snapshot.num_waiting, "waiting")) if most > now]  # fmt: skip
    return [(f"  peak in {PEAK_S:.0f} s: {', '.join(words)}", "dim")] if words else []


def _limit(snapshot: Snapshot) -> list[Span]:
    """What keeps the engine from doing more, in a word; the last step says nothing of an engine without work."""
    if snapshot.pause is not PauseState.RUNNING:
        return [("  ⏸ PAUSED", "warn")]
    if not snapshot.num_running + snapshot.num_waiting:
        return [("  idle", "dim")]
    return [("  limit ", "dim"), (snapshot.last_step.limited_by.value, "text")] if snapshot.last_step else []


def next_line(scene: Scene, snapshot: Snapshot, width: int) -> Line:
    """The first that waits, and for what."""
    return fit([_label("next"), *_first_waiting(snapshot, width - 10)], width)


def _first_waiting(snapshot: Snapshot, width: int) -> list[Span]:
    """The head of the queue and what it waits for."""
    head = next((row for row in snapshot.waiting if row.position == 0), None)
    if not snapshot.num_waiting:
        return [("nobody waits", "dim")]
    if head is None:
        return [("not in sight: scrolled away or hidden by the filter (g, Esc)", "dim")]
    name = clean(head.request_id)
    words = waits_for(head, max(1, width - cell_len(name) - 11))
    return [(name, "strong"), (" waits for " if ": " in words else " waits: ", "dim"), (words, "waiting")]


_TELLS_ITSELF = (WaitReason.SEQUENCE_CAP, WaitReason.BUDGET, WaitReason.PAUSED)
"""Reasons whose detail is a sentence of its own."""


def waits_for(row: RequestRow, width: int = 0) -> str:
    """The reason in words and numbers; the short word alone where `width` is given and has no room for more."""
    reason = row.wait_reason.value if row.wait_reason else UNKNOWN
    detail = clean(row.wait_detail)
    if row.wait_reason is WaitReason.BEHIND and detail:
        detail = detail.split(": needs", 1)[0]  # what the head needs stands in the head's own row
        words = detail
    elif not detail or row.wait_reason in _TELLS_ITSELF:
        words = detail or reason
    else:
        words = f"{SHORT_REASONS.get(reason, reason)}: {detail}"
    return words if not width or cell_len(words) <= width else _shorter(row, words, width)


def _shorter(row: RequestRow, words: str, width: int) -> str:
    detail, reason = clean(row.wait_detail), row.wait_reason
    if reason in (None, WaitReason.BEHIND):
        return words
    if reason is WaitReason.KV_BLOCKS and (short_detail := detail.replace(" blocks", " blk")):
        return short_detail  # "needs 9 blk, 0 free" tells what it waits for
    return reason.value if cell_len(reason.value) <= width else SHORT_REASONS.get(reason.value, reason.value)


def preempted_line(scene: Scene, snapshot: Snapshot, width: int) -> Line:
    """Who was preempted last, for whom, at what cost; how often that happens."""
    speed = rates(scene.view, scene.now)
    often: Span = (f" {rate(speed.preemptions if speed else None)}/s", "preempted" if speed and speed.preemptions
                   else "dim")  # fmt: skip
    if not snapshot.recent_preemptions:
        return between([_label("preempted"), ("nobody since start", "dim")], [often], width)
    last = snapshot.recent_preemptions[-1]
    ago = f"{age(max(0.0, scene.engine_now - last.mono))} ago"
    is_roomy = width >= _ROOMY
    facts = f" · {count(last.num_lost_tokens)} tokens lost, {ago}" if is_roomy else f" {ago}"
    ids = max(8, (width - 15 - len(facts) - (len(often[0]) if is_roomy else 0)) // 2)
    victim, cause = (name if len(name) <= ids else cut_id(name, ids) for name in (clean(last.victim), whom(last)))
    left: list[Span] = [
        _label("preempted"),
        (victim, "preempted"),
        (" for ", "dim"),
        (cause, "running"),
        (facts, "dim"),
    ]
    return between(left, [often] if is_roomy else [], width)


_ROOMY = 70
"""Room from which the line about the last preemption tells its cost and the rate."""


def whom(preemption: Preemption) -> str:
    """For whom a request was thrown out, in words."""
    if preemption.beneficiary is None:
        return "an operator"
    return "itself" if preemption.beneficiary == preemption.victim else clean(preemption.beneficiary)


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
    """The pool as a bar, then what of it is in use, cached and free."""
    pool = snapshot.pool
    left: list[Span] = [_label("KV"), (f"{percent(pool.in_use, pool.usable):<4}", "strong"), (" used       ", "dim")]
    right: list[Span] = [
        (f" {count(pool.in_use)} used", "kv_used"),
        (f" {count(pool.cached)} cached", "kv_cached"),
        (f" {count(pool.free - pool.cached)} free", "dim"),
        (f" of {count(pool.usable)} blk", "dim"),
    ]
    room = width - sum(len(text) for text, _ in left + right)
    parts = [(float(amount), glyph, role) for amount, glyph, role, _ in kv_counts(pool)]
    return fit([*left, *bar(parts, max(4, room)), *right], width)


def latency_line(scene: Scene, width: int) -> Line:
    """p50/p99 of the last seconds, in one line."""
    latencies = scene.view.update.latencies if scene.view.update else {}
    parts: list[Sequence[Span]] = [[("p50/p99 ", "dim")]]
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
    told = _last_action(scene)
    countdown = () if width_of(told) + width_of(_countdown(scene)) > width and _is_refused(scene) else _countdown(scene)
    return between(told, countdown, width)


def _is_refused(scene: Scene) -> bool:
    return scene.ui.action is not None and scene.ui.action.outcome is Outcome.REFUSED


def action_rest(scene: Scene, width: int) -> Line:
    """What of a refusal doesn't fit into its line: it stands in the line below until a key is pressed."""
    told = _last_action(scene)
    if scene.ui.is_action_read or scene.ui.prompt is not None or not _is_refused(scene) or width_of(told) <= width:
        return ()
    words = "".join(text for text, _ in told)
    shown = plain(fit(told, width)).rstrip().removesuffix("…")
    start = shown.rstrip().rfind(" ") + 1  # a word that was cut is read whole here
    return (("  … ", "dim"), (words[start:], "bad"))


def _countdown(scene: Scene) -> Line:
    """How long a change has left that undoes itself."""
    pending = scene.view.update.pending_change if scene.view.update else None
    if pending is None or scene.is_stale:
        return ()
    left = max(0.0, pending.rolls_back_at_mono - scene.engine_now)
    return ((f"  ⟳ undone in {left:.0f} s ", "warn"), ("K", "key"), (" keeps it ", "warn"))


def _last_action(scene: Scene) -> list[Span]:
    action = scene.ui.action
    if action is None:
        read_only = "read-only: nothing can be changed from here"
        return [(read_only if scene.ui.is_read_only else "nothing changed from here yet", "dim")]
    glyph, role = {
        Outcome.PENDING: ("…", "staged"),
        Outcome.DONE: ("✓", "good"),
        Outcome.REFUSED: ("✗", "bad"),
        Outcome.NEWS: ("◆", "knob"),
    }[action.outcome]
    word = "refused: " if action.outcome is Outcome.REFUSED else ""
    answer: list[Span] = [(f"{word}{clean(action.answer)}", role)] if action.answer else []
    what: list[Span] = [(f"{clean(action.what)}  ", "text")] if action.what else []
    return [(f"{glyph} ", role), *what, *answer]
