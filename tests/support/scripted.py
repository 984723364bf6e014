"""A runner that can be made to fail, and a KV connector whose loads end when a test says so."""

import zlib
from collections.abc import Sequence

from schedtop.engine.core import EngineCore
from schedtop.engine.kv.connector.base import KVConnectorMetadata
from schedtop.engine.request import Request
from schedtop.engine.runner.fake import FakeRunner
from schedtop.engine.sched import transfers
from schedtop.engine.sched.output import ModelRunnerOutput, SchedulerOutput


class FaultyRunner(FakeRunner):
    """Raises in the step of a given number, or in the next one; before it has run, or afterwards."""

    fail_next = False
    failing_step: int | None = None
    fails_late = False

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        failing = self.fail_next or scheduler_output.step == self.failing_step
        self.fail_next = False
        if failing and not self.fails_late:
            raise RuntimeError("the device is gone")
        result = super().execute_model(scheduler_output)
        if failing:
            raise RuntimeError("the device is gone, afterwards")
        return result


class ScriptedConnector:
    """Implements `KVConnector`: promises `num_loadable` tokens to whoever asks; loads end by `end`."""

    def __init__(self, core: EngineCore, runner: FakeRunner) -> None:
        self.core = core
        self.runner = runner
        self.num_loadable: int | None = 0
        self.keeps_blocks = False
        self.loading: dict[str, tuple[Request, list[int], int]] = {}
        self.unsure: set[str] = set()
        self.sending: set[str] = set()
        self.finished: list[tuple[str, list[int]]] = []
        core.scheduler.connector = self
        core.scheduler.defers_block_free = True

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        if self.num_loadable is None:
            self.unsure.add(request.request_id)
        return self.num_loadable

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        assert request.request_id not in self.loading
        self.loading[request.request_id] = (request, list(block_ids), num_computed_tokens)

    def build_connector_meta(self, scheduled: Sequence[Request]) -> KVConnectorMetadata | None:
        return None

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        self.finished.append((request.request_id, list(block_ids)))
        if self.keeps_blocks and block_ids:
            self.sending.add(request.request_id)
            return True
        return False

    def end(self, request_id: str, is_ok: bool = True) -> None:
        """A load is over: the blocks hold what they should, or rubbish."""
        request, block_ids, start = self.loading.pop(request_id)
        write_kv(self.runner, request.token_ids, block_ids, start, is_ok)
        self.core.post(lambda: transfers.load_finished(self.core.scheduler, request_id, is_ok))

    def answer(self) -> None:
        """What `None` left open is known now."""
        waiting, self.unsure = self.unsure, set()
        for request_id in sorted(waiting):
            self.core.post(lambda name=request_id: transfers.connector_answered(self.core.scheduler, name))

    def sent(self, request_id: str) -> None:
        """The blocks of an ended request have been read."""
        self.sending.discard(request_id)
        self.core.post(lambda: transfers.send_finished(self.core.scheduler, request_id))


def write_kv(runner: FakeRunner, token_ids: list[int], block_ids: list[int], start: int, is_ok: bool) -> None:
    """Fill blocks as if the tokens from `start` on had been computed into them (or with rubbish)."""
    size, prefix = runner.block_size, 0
    for position in range(start + len(block_ids) * size):
        prefix = zlib.crc32(b"%d" % token_ids[position], prefix)
        if position >= start:
            block_id = block_ids[(position - start) // size]
            runner.block_contents.setdefault(block_id, {})[position % size] = prefix if is_ok else -7
