"""A runner without a model: the next token is a hash of the whole prefix. For tests.

It keeps its own view of each request, as the real one does, so a scheduler that lies about tokens, positions or
blocks is found out: every write to a KV slot is checked against the request that owns the block.
"""

import zlib
from array import array
from collections.abc import Callable, Iterable

from schedtop.engine.kv.connector.format import KVFormat
from schedtop.engine.runner.kv_transfer import BlockMemory, KVTransfer, NoTransfer, run_with_transfers
from schedtop.engine.sched.output import ModelRunnerOutput, NewRequestData, SchedulerOutput

NextToken = Callable[[list[int]], int]
NUM_MASK_WORDS = 32
"""With a grammar its vocabulary has 1024 tokens."""


def hash_of_prefix(vocab_size: int = 1000) -> NextToken:
    """Next token = CRC-32 of all tokens before it, modulo `vocab_size`."""
    return lambda token_ids: zlib.crc32(array("q", token_ids).tobytes()) % vocab_size


class FakeRunner:
    """Implements `ModelRunner`. `block_contents` is its KV cache: what prefix each slot was computed from."""

    def __init__(
        self,
        block_size: int = 16,
        next_token: NextToken | None = None,
        proposer: Callable[[list[int]], list[int]] | None = None,
    ) -> None:
        self.block_size = block_size
        self.next_token = next_token or hash_of_prefix()
        self.proposer = proposer
        self.requests: dict[str, _FakeRequest] = {}
        self.block_contents: dict[int, dict[int, int]] = {}
        self.encoded: set[str] = set()
        """Content hashes of media whose embeddings are there."""
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.memory: BlockMemory = FakeMemory(self.block_contents, block_size)
        self.transfer: KVTransfer = NoTransfer()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step; asserts that every context block holds what the request's tokens say."""
        return run_with_transfers(self.transfer, scheduler_output, self._run_step)

    def _run_step(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        self.num_steps += 1
        self.num_computed_tokens += scheduler_output.total_num_scheduled_tokens
        self._update_requests(scheduler_output)
        self._encode(scheduler_output)
        sampled, drafts = [], {}
        for req_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self.requests[req_id]
            tokens = self._run(request, num_tokens, scheduler_output.scheduled_spec_decode_tokens.get(req_id, []))
            sampled.append(tokens)
            if tokens and self.proposer is not None:
                drafts[req_id] = self.proposer(request.token_ids)
        return ModelRunnerOutput(sampled_token_ids=sampled, draft_token_ids=drafts)

    def shutdown(self) -> None:
        """Forget everything."""
        self.transfer.shutdown()
        self.requests.clear()

    def _update_requests(self, output: SchedulerOutput) -> None:
        for req_id in [*output.finished_req_ids, *output.preempted_req_ids]:
            self.requests.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            self.requests[new.req_id] = _FakeRequest(new)
        for req_id, block_ids in output.scheduled_cached_reqs.new_block_ids.items():
            if req_id in self.requests:
                self.requests[req_id].block_ids += block_ids

    def _run(self, request: "_FakeRequest", num_tokens: int, drafts: Iterable[int]) -> list[int]:
        drafts = self._fill_in(request, list(drafts))
        start, stop = request.num_computed, request.num_computed + num_tokens
        tokens = request.token_ids + drafts
        assert stop <= len(tokens), f"{request.req_id}: scheduled {num_tokens} at {start} of {len(tokens)} tokens"
        self._check_context(request, start)
        self._check_media(request, start, stop)
        self._write(request, tokens, start, stop)
        request.num_computed = stop
        if stop < len(request.token_ids) + len(drafts):
            return []
        sampled: list[int] = []
        for draft in [*drafts, None]:
            token = request.obey_grammar(self.next_token(request.token_ids))
            sampled.append(token)
            request.token_ids.append(token)
            if token != draft:
                break
        request.num_computed = len(request.token_ids) - 1
        return sampled

    def _fill_in(self, request: "_FakeRequest", drafts: list[int]) -> list[int]:
        """Unknown drafts (-1) become what the proposer says; what it doesn't say stays wrong."""
        if self.proposer is None or -1 not in drafts:
            return drafts
        proposed = self.proposer(request.token_ids)[: len(drafts)]
        return proposed + drafts[len(proposed) :]

    def _check_context(self, request: "_FakeRequest", stop: int) -> None:
        """Every token before the scheduled ones must stand in the cache, computed from this very prefix."""
        prefix = 0
        for position in range(stop):
            prefix = zlib.crc32(b"%d" % request.token_ids[position], prefix)
            block_id, slot = request.slot(position, self.block_size)
            found = self.block_contents.get(block_id, {}).get(slot)
            assert found == prefix, f"{request.req_id}: block {block_id} slot {slot} holds another context"

    def _encode(self, output: SchedulerOutput) -> None:
        self.encoded.difference_update(output.freed_media)
        for items in output.encoder_inputs.values():
            for item in items:
                assert item.content_hash not in self.encoded, f"{item} is encoded again while it is still there"
                self.encoded.add(item.content_hash)

    def _check_media(self, request: "_FakeRequest", start: int, stop: int) -> None:
        """Placeholder tokens can be computed only from embeddings that are there."""
        for item in request.media:
            if item.offset < stop and item.offset + item.num_tokens > start:
                assert item.content_hash in self.encoded, f"{request.req_id}: {item} isn't encoded"

    def _write(self, request: "_FakeRequest", tokens: list[int], start: int, stop: int) -> None:
        prefix = 0
        for position in range(stop):
            prefix = zlib.crc32(b"%d" % tokens[position], prefix)
            if position >= start:
                block_id, slot = request.slot(position, self.block_size)
                self.block_contents.setdefault(block_id, {})[slot] = prefix


class FakeMemory:
    """The fake KV cache by block: per slot the prefix it was computed from, as int64; -1 where there is none."""

    def __init__(self, contents: dict[int, dict[int, int]], block_size: int) -> None:
        self._contents = contents
        self._block_size = block_size

    def format(self, model: str, namespace: str = "") -> KVFormat:
        """What the blocks are."""
        return KVFormat(model=model, dtype="int64", block_shape=(self._block_size,), namespace=namespace)

    def read_block(self, block_id: int) -> bytes:
        """A copy of a block."""
        content = self._contents.get(block_id, {})
        return array("q", [content.get(slot, -1) for slot in range(self._block_size)]).tobytes()

    def write_block(self, block_id: int, content: bytes) -> None:
        """Fill a block."""
        self._contents[block_id] = dict(enumerate(array("q", content)))


class _FakeRequest:
    """The runner's own view of one request."""

    def __init__(self, new: NewRequestData) -> None:
        self.req_id = new.req_id
        self.token_ids = list(new.token_ids)
        self.block_ids = list(new.block_ids)
        self.num_computed = new.num_computed_tokens
        self.media = new.media
        self.grammar = new.grammar.new_state() if new.grammar is not None else None
        for token in new.token_ids[new.num_prompt_tokens :] if self.grammar is not None else ():
            assert self.grammar is not None and self.grammar.accept(token)

    def obey_grammar(self, token: int) -> int:
        """The token if the grammar allows it, otherwise one that it allows, chosen by the token."""
        if self.grammar is None:
            return token
        words = [0] * NUM_MASK_WORDS
        self.grammar.fill_bitmask(words)
        allowed = [i for i in range(32 * NUM_MASK_WORDS) if words[i // 32] >> i % 32 & 1]
        token = token if token in allowed else allowed[token % len(allowed)]
        assert self.grammar.accept(token)
        return token

    def slot(self, position: int, block_size: int) -> tuple[int, int]:
        return self.block_ids[position // block_size], position % block_size
