"""Which running request is preempted when blocks run out. A rule only chooses; `Scheduler.preempt` acts."""

from collections.abc import Callable, Sequence

from schedtop.engine.knobs import Knobs, SchedulingPolicy, VictimRule
from schedtop.engine.request import Request

ChooseVictim = Callable[[Sequence[Request]], Request]
"""Takes the running requests in admission order (never empty), returns one of them."""


def newest(running: Sequence[Request]) -> Request:
    """The most recently admitted."""
    return running[-1]


def least_computed(running: Sequence[Request]) -> Request:
    """The one whose recomputation costs least; among equals the newest."""
    return min(reversed(running), key=lambda request: request.num_computed_tokens)


def most_blocks(running: Sequence[Request]) -> Request:
    """The one that frees most blocks; among equals the newest."""
    return max(reversed(running), key=lambda request: len(request.blocks))


VICTIM_RULES: dict[VictimRule, ChooseVictim] = {
    VictimRule.NEWEST: newest,
    VictimRule.LEAST_COMPUTED: least_computed,
    VictimRule.MOST_BLOCKS: most_blocks,
}


def choose_victim(running: Sequence[Request], knobs: Knobs, rule: ChooseVictim) -> Request:
    """Apply the policy, the cap on preemptions and the rule, in this order.

    Policy priority: largest priority value, then (rule newest) latest arrival, ties to the first in running order.
    Requests preempted `max_preemptions` times are spared while there is another; they were re-admitted with room for
    their whole answer, so they are never short of blocks themselves.
    """
    candidates = running
    if knobs.max_preemptions:
        spared = [request for request in running if request.num_preemptions < knobs.max_preemptions]
        candidates = spared or running
    if knobs.policy is SchedulingPolicy.PRIORITY:
        worst = max(request.priority for request in candidates)
        candidates = [request for request in candidates if request.priority == worst]
        if knobs.victim is VictimRule.NEWEST:
            return max(candidates, key=lambda request: request.arrival_time)
    return rule(candidates)
