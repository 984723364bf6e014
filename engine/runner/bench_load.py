"""What `schedtop bench engine` asks of each contender, and what it notes. No torch, no HTTP: contenders bring theirs.

A round answers a number of requests at once: prompts of equal length as token ids, greedy, a fixed number of tokens
each. All contenders of a round get the same prompts.
"""

import random
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

Prompts = list[list[int]]
NUM_SPARED = 100
"""Tokens at either end of a vocabulary that no prompt holds: special tokens are there."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What one round is made of."""

    concurrency: int
    prompt_tokens: int = 200
    output_tokens: int = 64

    @property
    def length(self) -> int:
        """Tokens of a request at its end."""
        return self.prompt_tokens + self.output_tokens

    @property
    def num_kv_blocks(self) -> int:
        """Blocks of 16 tokens with which nobody has to wait or is preempted."""
        return self.concurrency * (-(-self.length // 16) + 1) + 1

    def prompts(self, vocab_size: int, seed: str) -> Prompts:
        """Random prompts; another seed gives others, so that no prefix cache helps."""
        chance = random.Random(seed)
        tokens = range(NUM_SPARED, vocab_size - NUM_SPARED)
        return [chance.choices(tokens, k=self.prompt_tokens) for _ in range(self.concurrency)]


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One round's result."""

    tokens_per_s: float
    answers: Sequence[str] | Sequence[list[int]] = ()
    """What each request was answered: text from servers, token ids otherwise."""
    num_steps: int = 0
    split: dict[str, float] = {}
    """Seconds of the round by what they were spent on; add up to all of it."""


class Contender(Protocol):
    """Something that answers a load."""

    name: str

    def run(self, prompts: Prompts, output_tokens: int) -> Round:
        """Answer all prompts, all at once."""
        ...


def alternate(
    contenders: Sequence[Contender], load: Load, num_rounds: int, *, vocab_size: int, seed: int, pause_s: float = 0.0
) -> dict[str, list[Round]]:
    """Rounds of all contenders in turn, so that what else the machine does touches all alike; one unmeasured first.

    Each round begins with another contender, so that none always follows the same. `pause_s` before each turn lets the
    one before come to rest. Returns name -> its rounds.
    """
    rounds: dict[str, list[Round]] = {contender.name: [] for contender in contenders}
    assert len(rounds) == len(contenders), "two contenders of one name"
    warm_up = msgspec.structs.replace(load, prompt_tokens=min(16, load.prompt_tokens), output_tokens=2)
    for contender in contenders:
        contender.run(warm_up.prompts(vocab_size, f"{seed} warm-up"), warm_up.output_tokens)
    for number in range(num_rounds):
        prompts = load.prompts(vocab_size, f"{seed} {load.concurrency} {number}")
        first = number % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            time.sleep(pause_s)
            rounds[contender.name].append(contender.run(prompts, load.output_tokens))
    return rounds
