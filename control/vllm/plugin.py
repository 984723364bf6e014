"""`vllm serve MODEL --scheduler-cls schedtop.control.vllm.plugin.SchedtopScheduler`: our controls inside a real vLLM.

Derives from AsyncScheduler, which also works in sync mode; a plain Scheduler subclass would silently lose async
scheduling. The hooks below only count and hand over plain memory; sockets and encoding live in the control thread.
Whatever goes wrong here, the engine serves on: each hook falls back to vLLM's own behaviour.
"""

import logging
import os
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequestType
from vllm.v1.engine.core import EngineCore

from schedtop import __version__
from schedtop.control.audit import AuditLog
from schedtop.control.discovery import socket_path, state_folder
from schedtop.control.messages import EngineInfo
from schedtop.control.server import ControlServer
from schedtop.control.vllm import guard
from schedtop.control.vllm.core import VllmCore
from schedtop.control.vllm.engine import VllmEngine
from schedtop.control.vllm.watch import Books, Counts, PlannedStep
from schedtop.engine.config import EngineConfig
from schedtop.engine.knobs import knob_table
from schedtop.engine.outputs import EngineCoreOutputs as OurOutputs
from schedtop.engine.snapshot import LimitedBy, PauseState, Preemption

logger = logging.getLogger("schedtop.vllm")

NUM_RECORDS = 4096
GOODBYE_S = 3.0
"""How long vLLM's shutdown waits for the control server to say goodbye."""


class SchedtopScheduler(AsyncScheduler):
    """vLLM's scheduler with a control socket."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._books = Books()
        self._core: VllmCore | None = None
        self._engine: VllmEngine | None = None
        self._server: ControlServer | None = None
        self._plan: PlannedStep | None = None
        """The step being planned."""
        try:
            self._open_control()
        except Exception as error:
            logger.exception("schedtop: no control socket (%s); vLLM serves on without it", error)
            self._engine = self._core = None

    # ---- start ----------------------------------------------------------------------------------------------

    def _open_control(self) -> None:
        if absent := guard.missing(self):
            logger.error("schedtop: no control socket, this vLLM's scheduler has no %s", ", ".join(absent))
            return
        import vllm

        if not vllm.__version__.startswith(guard.TESTED_VERSIONS):
            logger.warning("schedtop: tested with vLLM %s, this is %s", guard.TESTED_VERSIONS[0], vllm.__version__)
        config = self._our_config()

        def say(line: str) -> None:
            logger.warning("schedtop: %s", line)

        table = guard.usable_knobs(self, knob_table(config), say)
        core = VllmCore(self, self._books, config, table)
        engine = VllmEngine(core, self._engine_waker())
        audit = AuditLog(state_folder() / f"{config.name}.audit.sqlite")
        server = ControlServer(engine, self._info(config), table, audit, guard.usable_commands(self, say))
        path = socket_path(config.name)
        server.start(path)
        self._core, self._engine, self._server = core, engine, server
        logger.info("schedtop: control socket %s", path)

    def _our_config(self) -> EngineConfig:
        """vLLM's sizes as ours: the ceilings of every knob, read once."""
        name = os.environ.get("SCHEDTOP_NAME", "vllm")
        rank = self.parallel_config.data_parallel_rank if self.parallel_config.data_parallel_size > 1 else None
        return EngineConfig(
            name=name if rank is None else f"{name}-dp{rank}",
            model=str(self.vllm_config.model_config.served_model_name or self.vllm_config.model_config.model),
            block_size=self.block_size,
            num_kv_blocks=self.kv_cache_config.num_blocks,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.scheduler_config.max_num_batched_tokens,
            max_num_seqs=self.max_num_running_reqs,
            ends_outgrown=False,
            readmits_when_paused=True,
        )

    def _info(self, config: EngineConfig) -> EngineInfo:
        import vllm

        return EngineInfo(
            name=config.name,
            model=config.model,
            boot_id=uuid.uuid4().hex,
            pid=os.getpid(),
            version=f"schedtop {__version__}, vLLM {vllm.__version__}",
            kind="vllm",
            block_size=config.block_size,
            num_usable_blocks=config.num_usable_blocks,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            backend=f"vLLM {vllm.__version__}",
            started_wall=time.time(),
        )

    def _engine_waker(self) -> Callable[[], None]:
        """How to wake an idle EngineCore: an entry in its input queue, found among the frames that built us."""
        frame: Any = sys._getframe()
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, EngineCore):
                return lambda: self._wake(owner)
            frame = frame.f_back
        logger.warning("schedtop: no engine core found above the scheduler: an idle engine can't be woken")
        return lambda: None

    def _wake(self, engine_core: Any) -> None:
        queue = getattr(engine_core, "input_queue", None)
        if queue is not None:
            queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    # ---- hooks ----------------------------------------------------------------------------------------------

    def has_requests(self) -> bool:
        """Also the boundary of an idle or paused engine, where `schedule` is never called."""
        if self._engine is None:
            return bool(super().has_requests())
        self._engine.boundary()
        has_requests = self._has_something_to_do()
        self._engine.is_idle = not has_requests
        if not has_requests and self._engine.has_calls:
            # Submitted while we weren't idle yet, so nobody will wake us for it.
            self._engine.is_idle = False
            return self.has_requests()
        return has_requests

    def _has_something_to_do(self) -> bool:
        if not super().has_requests() and not (self._core is not None and self._core.aborted):
            return False
        return bool(self.finished_req_ids) or not self._only_kept_back()

    def _only_kept_back(self) -> bool:
        """Whether all there is to do is kept from running by an operator: no reason to spin."""
        core = self._core
        if core is None or core.aborted or self.running or not (core.held or core.is_draining):
            return False
        return not any(core.admits(request) for request in [*self.waiting, *self.kv_holding_waiting])

    def add_request(self, request: Any) -> None:
        """A request from vLLM's own front end."""
        super().add_request(request)
        self._books.queued(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Boundary, then vLLM's own planning, then the count of what it planned."""
        if self._engine is None:
            return super().schedule(*args, **kwargs)
        self._engine.boundary()
        self._engine.is_idle = False
        plan = PlannedStep(self._books.step + 1, time.monotonic())
        self._books.step += 1
        self._plan = plan
        output = super().schedule(*args, **kwargs)
        plan.schedule_s = time.monotonic() - plan.started_at
        self._count(plan, output)
        self._books.in_flight.append(plan)
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's own, then the count of what came, and the word to clients whose requests were aborted here."""
        if self._engine is None or self._core is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        start = time.monotonic()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        num_finished = self._count_outputs(outputs)
        self._tell_aborted(outputs)
        if self._books.in_flight:
            self._publish(self._books.in_flight.popleft(), num_finished, time.monotonic() - start)
        return outputs

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """Ends from outside: a client that left, or our own abort."""
        ended = super().finish_requests(request_ids, finished_status)
        for request in ended or ():
            self._books.ended(request.request_id, "abort")
        return ended

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        """vLLM asks this of every waiting request it looks at: those kept back by an operator wait as well."""
        if self._core is not None and not self._core.admits(request):
            return False
        return bool(super()._handle_blocked_waiting_request(request))

    def _preempt_request(self, request: Any, timestamp: float, *args: Any, **kwargs: Any) -> None:
        """Note the victim, for whom, and what is lost."""
        pool = self.kv_cache_manager.block_pool
        before, num_lost = pool.get_num_free_blocks(), request.num_computed_tokens
        super()._preempt_request(request, timestamp, *args, **kwargs)
        after = pool.get_num_free_blocks()
        record = Preemption(
            step=self._books.step,
            mono=timestamp,
            victim=request.request_id,
            beneficiary=self._beneficiary(),
            num_lost_tokens=num_lost,
            num_blocks_freed=after - before,
            free_blocks_before=before,
            free_blocks_after=after,
            num_preemptions=request.num_preemptions,
        )
        self._books.preempted(record)
        if self._plan is not None:
            self._plan.num_preempted += 1
            self._plan.num_lost += num_lost

    def _beneficiary(self) -> str | None:
        """The request that vLLM was finding room for: a local of its `schedule`, two frames up; None outside it."""
        frame = sys._getframe(2)
        if frame.f_code.co_name != "schedule":
            return None
        request = frame.f_locals.get("request")
        return getattr(request, "request_id", None)

    # ---- counting -------------------------------------------------------------------------------------------

    def _count(self, plan: PlannedStep, output: Any) -> None:
        plan.budget = self.max_num_scheduled_tokens
        plan.total = output.total_num_scheduled_tokens
        if drafts := output.scheduled_spec_decode_tokens:
            plan.num_drafts = sum(map(len, drafts.values()))
        for new in output.scheduled_new_reqs:
            request = self.requests[new.req_id]
            self._books.admitted(new.req_id, request.num_prompt_tokens, new.num_computed_tokens, plan)
        for request_id in getattr(output.scheduled_cached_reqs, "resumed_req_ids", ()):
            self._books.admitted(request_id, 0, 0, plan)
        self._books.count_scheduled(plan, output.num_scheduled_tokens, self.running)
        plan.limited_by = self._books.last_limit = self._limit(plan)
        self._books.stats.computed_tokens += plan.total

    def _limit(self, plan: PlannedStep) -> LimitedBy:
        """What kept the step from doing more, from what is left after it."""
        assert self._core is not None
        if self._core.pause_state is PauseState.PAUSED_ALL:
            return LimitedBy.PAUSED
        if plan.total >= plan.budget:
            return LimitedBy.BUDGET
        if len(self.waiting) + len(self.kv_holding_waiting) <= len(self.deferred_waiting):
            return LimitedBy.COMPUTE if plan.num_scheduled else LimitedBy.NOTHING_WAITING
        if self._core.is_draining:
            return LimitedBy.PAUSED
        return LimitedBy.SEQUENCES if len(self.running) >= self.max_num_active_reqs else LimitedBy.BLOCKS

    def _count_outputs(self, outputs: dict[int, Any]) -> int:
        """Note tokens and ends; returns how many requests ended."""
        of_each = [client.outputs for client in outputs.values()]
        of_all = of_each[0] if len(of_each) == 1 else [output for part in of_each for output in part]
        self._books.got(of_all, time.monotonic())
        ended = [output for output in of_all if output.finish_reason is not None]
        for output in ended:
            self._books.ended(output.request_id, str(output.finish_reason))
        return len(ended)

    def _tell_aborted(self, outputs: dict[int, Any]) -> None:
        """Without this the client of a request aborted here would wait for ever."""
        assert self._core is not None
        aborted, self._core.aborted = self._core.aborted, []
        for request in aborted:
            client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            client.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id, new_token_ids=[], finish_reason=request.get_finished_reason()
                )
            )

    def _publish(self, plan: PlannedStep, num_finished: int, update_s: float) -> None:
        assert self._engine is not None
        assert self._core is not None
        pool = self.kv_cache_manager.block_pool
        num_waiting = len(self.waiting) + len(self.kv_holding_waiting)
        counts = Counts(
            len(self.running), num_waiting, len(self.deferred_waiting), pool.get_num_free_blocks(),
            self._core.config.num_usable_blocks,
        )  # fmt: skip
        record = self._books.record(plan, counts, num_finished, update_s)
        records = self._core.records
        records.append(record)
        if len(records) > 2 * NUM_RECORDS:
            del records[:NUM_RECORDS]
        self._engine.hand_out(OurOutputs(plan.step, [], self._books.stats.take_events(), record))

    def shutdown(self) -> None:
        """Close the control socket, then vLLM's own."""
        server, self._server = self._server, None
        if server is not None and self._engine is not None:
            server.begin_stop(0.0, reason="vLLM is shutting down")
            deadline = time.monotonic() + GOODBYE_S
            # The server ends by way of a boundary, and this is the thread that has them.
            while not server.ended.wait(0.005) and time.monotonic() < deadline:
                self._engine.boundary()
        super().shutdown()
