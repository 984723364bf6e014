"""The runner's own view of its requests, kept in rows of persistent buffers and updated by what changed.

A step's flat batch is cut out of the rows by index arithmetic. Nothing here computes with a model or samples.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sched.output import UNKNOWN_DRAFT, NewRequestData
from schedtop.engine.structured.backend import GrammarState
from schedtop.kernels.attention import AttentionMeta


@dataclass(slots=True)
class RunnerRequest:
    """What the runner remembers of one request besides its row of tokens and blocks."""

    req_id: str
    row: int
    sampling: SamplingParams
    num_prompt_tokens: int
    seed: int
    adapter: str | None = None
    grammar: GrammarState | None = None
    drafts: list[int] = field(default_factory=list)
    """This step's drafts, at the end of its scheduled tokens."""
    proposed: list[int] = field(default_factory=list)
    """Drafts for the next step."""


@dataclass(slots=True)
class StepBatch:
    """One step, flat: all tokens of all scheduled requests one after the other."""

    requests: list[RunnerRequest]
    num_tokens: NDArray[np.int64]
    """[num_reqs] tokens scheduled."""
    token_ids: torch.Tensor
    """int64 [num_tokens]"""
    positions: torch.Tensor
    """int64 [num_tokens]"""
    meta: AttentionMeta
    sampled_rows: torch.Tensor
    """int64: rows of the flat batch to be sampled from, in schedule order, drafts' rows before the last."""
    sampled_of: list[tuple[int, int]]
    """(index into `requests`, number of rows) of those that sample: drafts and one more."""


class InputBatch:
    """Rows of requests: tokens, block table, how many are known and how many computed.

    Rows grow when more requests live at once than expected (with steps in flight a row may be freed a step late).
    """

    def __init__(self, num_rows: int, max_tokens: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self._device = device
        self.token_ids = np.zeros((num_rows, max_tokens), np.int32)
        self.block_table = np.zeros((num_rows, -(-max_tokens // block_size)), np.int32)
        self.num_blocks = np.zeros(num_rows, np.int64)
        self.num_tokens = np.zeros(num_rows, np.int64)
        """Tokens known: prompt and output, without drafts."""
        self.num_computed = np.zeros(num_rows, np.int64)
        self._free = list(reversed(range(num_rows)))
        self.requests: dict[str, RunnerRequest] = {}

    # ---- updates --------------------------------------------------------------------------------------------

    def add(self, new: NewRequestData, seed: int) -> RunnerRequest:
        """Take in a request, new or resumed. One that is known by its id is replaced."""
        self.remove([new.req_id])
        row = self._take_row()
        count = len(new.token_ids)
        self.token_ids[row, :count] = new.token_ids
        self.num_tokens[row] = count
        self.num_computed[row] = new.num_computed_tokens
        self.num_blocks[row] = 0
        grammar = new.grammar.new_state() if new.grammar is not None else None
        for token in new.token_ids[new.num_prompt_tokens :] if grammar is not None else ():
            assert grammar is not None and grammar.accept(token), f"{new.req_id}: its own output breaks its grammar"
        request = RunnerRequest(new.req_id, row, new.sampling_params, new.num_prompt_tokens, seed, new.adapter, grammar)
        self.requests[new.req_id] = request
        self.append_blocks(new.req_id, new.block_ids)
        return request

    def append_blocks(self, req_id: str, block_ids: Sequence[int]) -> None:
        """Blocks that a known request got; an id that has gone meanwhile is ignored."""
        request = self.requests.get(req_id)
        if request is None or not block_ids:
            return
        start = int(self.num_blocks[request.row])
        self.block_table[request.row, start : start + len(block_ids)] = block_ids
        self.num_blocks[request.row] = start + len(block_ids)

    def remove(self, req_ids: Iterable[str]) -> None:
        """Forget requests that ended or were preempted."""
        for req_id in req_ids:
            request = self.requests.pop(req_id, None)
            if request is not None:
                self._free.append(request.row)

    def append_token(self, request: RunnerRequest, token: int) -> None:
        """A sampled token becomes known."""
        count = int(self.num_tokens[request.row])
        self.token_ids[request.row, count] = token
        self.num_tokens[request.row] = count + 1

    def tokens_of(self, request: RunnerRequest) -> NDArray[np.int32]:
        """All known tokens of a request (a view)."""
        return self.token_ids[request.row, : int(self.num_tokens[request.row])]

    def _take_row(self) -> int:
        if not self._free:
            self._double()
        return self._free.pop()

    def _double(self) -> None:
        num_rows = len(self.num_tokens)
        for name in ("token_ids", "block_table", "num_blocks", "num_tokens", "num_computed"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros_like(array)]))
        self._free += reversed(range(num_rows, 2 * num_rows))

    # ---- the step -------------------------------------------------------------------------------------------

    def prepare(self, num_scheduled: dict[str, int], drafts: dict[str, list[int]]) -> StepBatch:
        """Lay the scheduled tokens out flat. Drafts are put behind the known tokens, unknown ones as token 0."""
        requests = [self.requests[req_id] for req_id in num_scheduled]
        for request in requests:
            request.drafts = self._place_drafts(request, drafts.get(request.req_id, []))
        rows = np.array([request.row for request in requests], np.int64)
        num_tokens = np.fromiter(num_scheduled.values(), np.int64, len(requests))
        starts = np.concatenate([[0], np.cumsum(num_tokens)])
        index = np.repeat(np.arange(len(requests)), num_tokens)
        positions = np.arange(starts[-1]) - starts[index] + self.num_computed[rows][index]
        flat_rows = rows[index]
        seq_lens = self.num_computed[rows] + num_tokens
        sampled_rows, sampled_of = self._find_sampled(requests, seq_lens, starts)
        slots = self.block_table[flat_rows, positions // self.block_size].astype(np.int64) * self.block_size
        most_blocks = -(-int(seq_lens.max()) // self.block_size)
        meta = AttentionMeta(
            query_start_loc=self._put(starts.astype(np.int32)),
            seq_lens=self._put(seq_lens.astype(np.int32)),
            block_table=self._put(self.block_table[rows, :most_blocks]),
            slot_mapping=self._put(slots + positions % self.block_size),
            query_lens=num_tokens.tolist(),
            context_lens=seq_lens.tolist(),
        )
        return StepBatch(
            requests=requests,
            num_tokens=num_tokens,
            token_ids=self._put(self.token_ids[flat_rows, positions].astype(np.int64)),
            positions=self._put(positions),
            meta=meta,
            sampled_rows=self._put(sampled_rows),
            sampled_of=sampled_of,
        )

    def advance(self, step: StepBatch) -> None:
        """The step's tokens are computed."""
        for request, count in zip(step.requests, step.num_tokens.tolist(), strict=True):
            self.num_computed[request.row] += count

    def settle_drafts(self, step: StepBatch) -> None:
        """After sampling: what was computed for rejected drafts is void. All but the newest token is computed."""
        for index, _ in step.sampled_of:
            row = step.requests[index].row
            self.num_computed[row] = self.num_tokens[row] - 1

    def _place_drafts(self, request: RunnerRequest, drafts: list[int]) -> list[int]:
        """Drafts for this step; those planned as unknown are what the runner proposed itself meanwhile."""
        if UNKNOWN_DRAFT in drafts:
            proposed = request.proposed[: len(drafts)]
            drafts = proposed + [UNKNOWN_DRAFT] * (len(drafts) - len(proposed))
        if drafts:
            start = int(self.num_tokens[request.row])
            self.token_ids[request.row, start : start + len(drafts)] = np.maximum(drafts, 0)
        return drafts

    def _find_sampled(
        self, requests: list[RunnerRequest], seq_lens: NDArray[np.int64], starts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
        """Requests whose known tokens and drafts are all computed by this step, and the rows they sample from."""
        rows: list[int] = []
        sampled_of = []
        for index, request in enumerate(requests):
            known = int(self.num_tokens[request.row]) + len(request.drafts)
            assert seq_lens[index] <= known, f"{request.req_id}: scheduled to {seq_lens[index]} of {known} tokens"
            if seq_lens[index] == known:
                count = len(request.drafts) + 1
                end = int(starts[index + 1])
                rows += range(end - count, end)
                sampled_of.append((index, count))
        return np.array(rows, np.int64), sampled_of

    def _put(self, array: NDArray[np.int32] | NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
