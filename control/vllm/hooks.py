"""What the plugin does around vLLM's own methods: a boundary before each step, counts after it, the start and the end.

All of it runs in vLLM's engine thread, counts in plain memory and makes no system call; sockets and encoding live in
the control thread. Nothing that goes wrong in here reaches vLLM: the hooks switch themselves off, say why, and vLLM
serves on. Which vLLM method calls what is in `plugin.py`.
"""

import functools
import logging
import os
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequestType

from schedtop import __version__
from schedtop.control.audit import AuditLog
from schedtop.control.discovery import socket_path, state_folder
from schedtop.control.errors import SocketRefused
from schedtop.control.messages import EngineInfo
from schedtop.control.server import ControlServer
from schedtop.control.vllm import guard
from schedtop.control.vllm.core import VllmCore
from schedtop.control.vllm.engine import VllmEngine
from schedtop.control.vllm.rows import num_aside, num_waiting
from schedtop.control.vllm.watch import Books, Counts, PlannedStep
from schedtop.engine.config import EngineConfig
from schedtop.engine.errors import SchedtopError
from schedtop.engine.knobs import knob_table
from schedtop.engine.outputs import EngineCoreOutputs as OurOutputs
from schedtop.engine.snapshot import LimitedBy, PauseState, Preemption

logger = logging.getLogger("vllm.schedtop")

NUM_RECORDS = 4096
GOODBYE_S = 3.0
"""How long vLLM's shutdown waits for the control server to say goodbye."""
POLL_S = 0.02
"""Between the control thread's looks at what steps left. It needs the GIL for each, and no tokens wait for it here."""

P = ParamSpec("P")
R = TypeVar("R")


def harmless(
    hook: Callable[Concatenate["Hooks", P], R],
) -> Callable[Concatenate["Hooks", P], R | None]:
    """A hook that answers None once the hooks are off, and switches them off when it fails."""

    def guarded(self: "Hooks", /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if not self.is_on:
            return None
        try:
            return hook(self, *args, **kwargs)
        except Exception as error:
            self.give_up(error)
            return None

    functools.update_wrapper(guarded, hook)
    return guarded


class GaveUp(SchedtopError):
    """The plugin is off after a fault of its own."""


class Hooks:
    """One scheduler's hooks; `is_on` until one of them fails."""

    def __init__(self, scheduler: Any, config: EngineConfig, say: Callable[[str], None]) -> None:
        self.is_on = True
        self.books = Books()
        self.table = guard.usable_knobs(scheduler, knob_table(config), say)
        self.core = VllmCore(scheduler, self.books, config, self.table)
        self.engine = VllmEngine(self.core, _engine_waker())
        self.server: ControlServer | None = None
        self._scheduler = scheduler
        self._plan: PlannedStep | None = None
        """The step being planned."""
        self._result_began = 0.0

    def give_up(self, error: Exception) -> None:
        """Off for good, with nothing of vLLM's left paused."""
        self.is_on = False
        logger.error("schedtop: control is off after a fault (%r); vLLM serves on without it", error, exc_info=error)
        try:
            self.core.resume()
        except Exception:
            logger.exception("schedtop: vLLM may still be paused")
        self.engine.failure = GaveUp(f"schedtop is off inside vLLM after a fault ({error!r}); vLLM itself serves on")
        self.engine.is_alive = False
        self.engine.ring()

    # ---- boundaries -----------------------------------------------------------------------------------------

    @harmless
    def has_requests(self, of_vllm: Callable[[], bool]) -> bool:
        """The boundary of an idle engine, and whether there is anything to do."""
        engine = self.engine
        engine.boundary()
        answer = self._has_something_to_do(of_vllm)
        engine.is_idle = not answer
        if not answer and engine.has_calls:
            # Submitted while we weren't idle yet, so nobody will wake us for it.
            engine.is_idle = False
            engine.boundary()
            answer = self._has_something_to_do(of_vllm)
            engine.is_idle = not answer
        return answer

    def _has_something_to_do(self, of_vllm: Callable[[], bool]) -> bool:
        if self.core.aborted:
            return True
        return bool(of_vllm()) and (bool(self._scheduler.finished_req_ids) or not self.core.is_only_kept_back())

    @harmless
    def before_step(self) -> None:
        """The boundary of a busy engine, and a new step."""
        self.engine.boundary()
        self.engine.is_idle = False
        self.books.step += 1
        self._plan = PlannedStep(self.books.step, time.monotonic())

    @harmless
    def keeps_back(self, request: Any) -> bool:
        """Whether an operator keeps a waiting request from being scheduled."""
        return not self.core.admits(request)

    # ---- counting -------------------------------------------------------------------------------------------

    @harmless
    def queued(self, request: Any) -> None:
        """A request came."""
        self.books.queued(request)

    @harmless
    def ended_from_outside(self, ended: Any) -> None:
        """Requests that vLLM ended before their time."""
        for request in ended or ():
            self.books.ended(request.request_id, "abort")
            self.core.held.discard(request.request_id)

    @harmless
    def before_preemption(self, request: Any) -> tuple[int, int]:
        """Free blocks, and what the victim has computed."""
        free = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return free, request.num_computed_tokens

    @harmless
    def preempted(self, request: Any, before: int, num_lost: int) -> None:
        """vLLM has thrown a request out."""
        after = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        record = Preemption(
            step=self.books.step,
            mono=time.monotonic(),
            victim=request.request_id,
            beneficiary=_beneficiary(),
            num_lost_tokens=num_lost,
            num_blocks_freed=after - before,
            free_blocks_before=before,
            free_blocks_after=after,
            num_preemptions=request.num_preemptions,
        )
        self.books.preempted(record)
        if self._plan is not None:
            self._plan.num_preempted += 1
            self._plan.num_lost += num_lost

    @harmless
    def planned(self, output: Any) -> None:
        """Count what vLLM has planned."""
        plan, books, scheduler = self._plan, self.books, self._scheduler
        if plan is None:
            return
        plan.schedule_s = time.monotonic() - plan.started_at
        plan.budget = self.core.budget
        plan.total = output.total_num_scheduled_tokens
        if drafts := output.scheduled_spec_decode_tokens:
            plan.num_drafts = sum(map(len, drafts.values()))
        for new in output.scheduled_new_reqs:
            num_prompt = scheduler.requests[new.req_id].num_prompt_tokens
            books.admitted(new.req_id, num_prompt, new.num_computed_tokens, plan)
        for request_id in getattr(output.scheduled_cached_reqs, "resumed_req_ids", ()):
            books.admitted(request_id, 0, 0, plan)
        books.count_scheduled(plan, output.num_scheduled_tokens, scheduler.running)
        plan.limited_by = books.last_limit = self._limit(plan)
        books.stats.computed_tokens += plan.total
        books.in_flight.append(plan)

    def _limit(self, plan: PlannedStep) -> LimitedBy:
        """What kept the step from doing more, from what is left after it."""
        if self.core.pause_state is PauseState.PAUSED_ALL:
            return LimitedBy.PAUSED
        if plan.total >= plan.budget:
            return LimitedBy.BUDGET
        scheduler = self._scheduler
        if num_waiting(scheduler) <= num_aside(scheduler):
            return LimitedBy.COMPUTE if plan.num_scheduled else LimitedBy.NOTHING_WAITING
        if self.core.is_draining:
            return LimitedBy.PAUSED
        return LimitedBy.SEQUENCES if len(scheduler.running) >= self.core.sequence_cap else LimitedBy.BLOCKS

    @harmless
    def before_result(self) -> None:
        """A step's result is about to be taken in."""
        self._result_began = time.monotonic()

    def after_result(self, outputs: dict[int, Any]) -> None:
        """Count a step's result and tell the clients of those aborted here, which holds even after a fault."""
        num_finished = self._count_result(outputs)
        if self.core.aborted:
            self._tell_aborted(outputs)
        if num_finished is not None:
            self._publish(num_finished)

    @harmless
    def _count_result(self, outputs: dict[int, Any]) -> int:
        """Note tokens and ends; returns how many requests ended."""
        of_each = [client.outputs for client in outputs.values()]
        of_all = of_each[0] if len(of_each) == 1 else [output for part in of_each for output in part]
        return self.books.got(of_all, time.monotonic())

    def _tell_aborted(self, outputs: dict[int, Any]) -> None:
        """Without this the client of a request aborted here would wait for ever."""
        aborted, self.core.aborted = self.core.aborted, []
        for request in aborted:
            client = outputs.setdefault(request.client_index, EngineCoreOutputs())
            client.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id, new_token_ids=[], finish_reason=request.get_finished_reason()
                )
            )

    @harmless
    def _publish(self, num_finished: int) -> None:
        books, core, scheduler = self.books, self.core, self._scheduler
        if not books.in_flight:
            return
        plan = books.in_flight.popleft()
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        counts = Counts(
            len(scheduler.running), num_waiting(scheduler), num_aside(scheduler), free, core.config.num_usable_blocks
        )
        record = books.record(plan, counts, num_finished, time.monotonic() - self._result_began)
        core.records.append(record)
        if len(core.records) > 2 * NUM_RECORDS:
            del core.records[:NUM_RECORDS]
        self.engine.hand_out(OurOutputs(plan.step, [], books.stats.take_events(), record))

    # ---- the end --------------------------------------------------------------------------------------------

    @harmless
    def shutdown(self) -> None:
        """Say goodbye to whoever is connected; takes `GOODBYE_S` at most."""
        server, self.server = self.server, None
        if server is None:
            return
        server.begin_stop(0.0, reason="vLLM is shutting down")
        deadline = time.monotonic() + GOODBYE_S
        # The server ends by way of a boundary, and this is the thread that has them.
        while not server.ended.wait(0.005) and time.monotonic() < deadline:
            self.engine.boundary()


# ---- the start ----------------------------------------------------------------------------------------------


def open_control(scheduler: Any) -> Hooks | None:
    """The hooks of a scheduler whose control socket is open. None, said in the log, where vital attributes miss."""
    if absent := guard.missing(scheduler):
        logger.error("schedtop: no control socket, this vLLM's scheduler has no %s", ", ".join(absent))
        return None
    version = _vllm_version()
    if not version.startswith(guard.TESTED_VERSIONS):
        logger.warning("schedtop: tested with vLLM %s, this is %s", guard.TESTED_VERSIONS[0], version)

    def say(line: str) -> None:
        logger.warning("schedtop: %s", line)

    config = config_of(scheduler)
    hooks = Hooks(scheduler, config, say)
    audit = AuditLog(state_folder() / f"{config.name}.audit.sqlite")
    commands = guard.usable_commands(scheduler, say)
    server = ControlServer(hooks.engine, _info(config), hooks.table, audit, commands, POLL_S)
    path = socket_path(config.name)
    try:
        server.start(path)
    except SocketRefused as refused:
        logger.error("schedtop: no control socket (%s; here: SCHEDTOP_NAME=...); vLLM serves on without it", refused)
        return None
    hooks.server = server
    logger.info("schedtop: control socket %s", path)
    return hooks


def _vllm_version() -> str:
    import vllm

    return str(getattr(vllm, "__version__", "unknown"))


def config_of(scheduler: Any) -> EngineConfig:
    """vLLM's sizes as ours: the ceilings of every knob, read once."""
    name, rank = (
        os.environ.get("SCHEDTOP_NAME", "vllm"),
        _data_parallel_rank(getattr(scheduler, "parallel_config", None)),
    )
    model = scheduler.vllm_config.model_config
    return EngineConfig(
        name=name if rank is None else f"{name}-dp{rank}",
        model=str(getattr(model, "served_model_name", None) or model.model),
        block_size=scheduler.block_size,
        num_kv_blocks=scheduler.kv_cache_config.num_blocks,
        max_model_len=scheduler.max_model_len,
        max_num_batched_tokens=scheduler.scheduler_config.max_num_batched_tokens,
        max_num_seqs=scheduler.max_num_running_reqs,
        ends_outgrown=False,
        readmits_when_paused=True,
    )


def _data_parallel_rank(parallel: Any) -> int | None:
    """Which of several data-parallel engines this is; None when there is one.

    vLLM tells the ranks of a dense model that each is alone, but leaves them their number, and what was the largest.
    """
    sizes = [getattr(parallel, name, 1) or 1 for name in ("data_parallel_size", "elastic_ep_max_dp_size")]
    rank = int(getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0)))
    return rank if rank or max(sizes) > 1 else None


def _info(config: EngineConfig) -> EngineInfo:
    version = _vllm_version()
    return EngineInfo(
        name=config.name,
        model=config.model,
        boot_id=uuid.uuid4().hex,
        pid=os.getpid(),
        version=f"schedtop {__version__}, vLLM {version}",
        kind="vllm",
        block_size=config.block_size,
        num_usable_blocks=config.num_usable_blocks,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        backend=f"vLLM {version}",
        started_wall=time.time(),
    )


def _engine_waker() -> Callable[[], None]:
    """How to wake an idle EngineCore: an entry in its input queue, found among the frames that built us."""
    frame: Any = sys._getframe()
    while frame is not None:
        owner = frame.f_locals.get("self")
        if any(base.__name__ == "EngineCore" for base in type(owner).__mro__):
            return functools.partial(_wake, owner, EngineCoreRequestType.WAKEUP)
        frame = frame.f_back
    logger.warning("schedtop: no engine core found above the scheduler: an idle engine can't be woken")
    return lambda: None


def _wake(engine_core: Any, message: Any) -> None:
    queue = getattr(engine_core, "input_queue", None)  # an engine core in its caller's thread has none
    if queue is not None:
        queue.put_nowait((message, None))


def _beneficiary() -> str | None:
    """The request that vLLM was finding room for: a local of its `schedule`, some frames up; None outside it."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "schedule":
        frame = frame.f_back
    request = None if frame is None else frame.f_locals.get("request")
    return getattr(request, "request_id", None)
