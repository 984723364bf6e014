"""vLLM's scheduler with the plugin and no model, for tests: a script for a Python that has vLLM. `CASE [ARGUMENT]`.

Prints one JSON object. `reads`: what our code reads of the scheduler. `hide NAME...`: the same run with NAME hidden
from our code. `quiet`: steps under a watcher, in a thread in which any system call but those of locks and memory is
death; `quiet offend` makes one. `policy`: what a change of policy does to a long queue. `fault`: a fault of our own.
"""

import asyncio
import ctypes
import faulthandler
import json
import logging
import os
import signal
import struct
import sys
import tempfile
import threading
from collections import deque
from typing import Any

from schedtop.control.vllm.scheduler_alone import DEFAULTS, make_request, make_scheduler, prepare

BLOCK, NUM_REQUESTS, MAX_TOKENS = 16, 6, 60
PROXIED = {"kv_cache_manager", "kv_cache_manager.block_pool", "scheduler_config"}
SETTINGS = {
    **DEFAULTS, "num_blocks": 26, "max_num_batched_tokens": 64, "max_num_seqs": 5, "max_model_len": 256,
    "scheduler_reserve_full_isl": False, "enable_prefix_caching": False,
}  # fmt: skip


class Veil:
    """What our code sees of an object: all but `hidden`; `seen` notes what it asks for."""

    def __init__(self) -> None:
        self.hidden = ""
        self.seen: set[str] = set()

    def look(self, path: str, owner: Any, name: str) -> Any:
        self.seen.add(path)
        if path == self.hidden:
            raise AttributeError(name)
        value = object.__getattribute__(owner, name)
        return Veiled(self, path, value) if path in PROXIED else value


class Veiled:
    def __init__(self, veil: Veil, path: str, owner: Any) -> None:
        self.__dict__.update(veil=veil, path=path, owner=owner)

    def __getattr__(self, name: str) -> Any:
        return self.veil.look(f"{self.path}.{name}", self.owner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.owner, name, value)


def veiled_class(veil: Veil) -> Any:
    from schedtop.control.vllm.plugin import SchedtopScheduler

    class VeiledScheduler(SchedtopScheduler):
        def __getattribute__(self, name: str) -> Any:
            asker = sys._getframe(1).f_globals.get("__name__", "")
            if asker.startswith("schedtop.control.vllm.") and not asker.endswith(".plugin"):
                return veil.look(name, self, name)
            return object.__getattribute__(self, name)

    return VeiledScheduler


class Log(logging.Handler):
    """What the plugin said."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logger = logging.getLogger("vllm.schedtop")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def result_of(scheduler: Any, output: Any) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(output.num_scheduled_tokens)
    requests = [scheduler.requests[request_id] for request_id in ids]
    sampled = [[] if request.is_prefill_chunk else [7] for request in requests]
    return ModelRunnerOutput(ids, {request_id: i for i, request_id in enumerate(ids)}, sampled)


class Driver:
    """Steps a scheduler as vLLM's engine core does, two in flight when it is async."""

    def __init__(self, scheduler: Any, depth: int) -> None:
        self.scheduler, self.depth = scheduler, depth
        self.in_flight: deque[Any] = deque()
        self.num_tokens: dict[str, int] = {}
        self.ends: dict[str, str] = {}

    def step(self) -> None:
        output = self.scheduler.schedule()
        self.in_flight.append((output, result_of(self.scheduler, output)))
        if len(self.in_flight) >= self.depth:
            self.take_result()

    def take_result(self) -> None:
        outputs = self.scheduler.update_from_output(*self.in_flight.popleft())
        for client in outputs.values():
            for one in client.outputs:
                self.num_tokens[one.request_id] = self.num_tokens.get(one.request_id, 0) + len(one.new_token_ids)
                if one.finish_reason is not None:
                    self.ends[one.request_id] = str(one.finish_reason)

    def run_out(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if self.scheduler.has_requests():
                self.step()
            elif self.in_flight:
                self.take_result()
            else:
                return
        raise AssertionError(f"not at an end after {limit} steps: {self.num_tokens}")


def operate(driver: Driver, commands: set[str], calls: list[Any]) -> None:
    """Every command there is, spread over steps; nothing stays held or paused."""
    from schedtop.engine.snapshot import Viewport

    hooks = driver.scheduler.schedtop
    view = Viewport(kv_cells=10, detail="r3")
    values = {
        "max_num_batched_tokens": 32, "max_num_seqs": 4, "long_prefill_token_threshold": 20, "watermark": 0.05,
        "policy": "priority", "reserve_full_prompt": True, "long_prefill_token_threshold_adaptive": True,
    }  # fmt: skip
    doings = [
        ("", lambda core: core.snapshot(view)), ("", lambda core: core.state()),
        ("SelfCheck", lambda core: core.self_check()),
        *(("", lambda core, n=spec.name: core.set_knobs({n: values[n]})) for spec in hooks.table),
        ("", lambda core: core.set_knobs({spec.name: spec.default for spec in hooks.table if spec.name == "policy"})),
        ("SetPriority", lambda core: core.set_priority(["r5"], -3)),
        ("SetMaxTokens", lambda core: core.set_max_tokens(["r4"], MAX_TOKENS + 3)),
        ("PreemptRequests", lambda core: core.preempt(core.match(id_prefix="r"))),
        ("HoldRequests", lambda core: core.hold(["r2"])), ("", lambda core: core.snapshot(view)),
        ("ReleaseRequests", lambda core: core.release(["r2"])),
        ("Pause", lambda core: core.pause("keep")), ("Resume", lambda core: core.resume()),
        ("ResetPrefixCache", lambda core: core.reset_prefix_cache(True)),
        ("AbortRequests", lambda core: core.abort(["r1"])), ("", lambda core: core.snapshot(view)),
    ]  # fmt: skip
    for needs, doing in doings:
        if not needs or needs in commands:
            calls.append(hooks.engine.submit(doing, lambda call: None))
        if driver.scheduler.has_requests():
            driver.step()


def scenario(name: str, hidden: str, is_async: bool = True) -> dict[str, Any]:
    """Requests that don't all fit, operated on, run to their ends."""
    veil, log, calls = Veil(), Log(), []
    os.environ["SCHEDTOP_NAME"] = name
    veil.hidden = hidden
    scheduler = make_scheduler({**SETTINGS, "async_scheduling": is_async}, True, veiled_class(veil))
    driver = Driver(scheduler, 2 if is_async else 1)
    for i in range(NUM_REQUESTS):
        scheduler.add_request(make_request(f"r{i}", [10 + i] * 40, MAX_TOKENS, BLOCK, float(i), priority=i % 2))
    for _ in range(5):
        driver.step()
    hooks = scheduler.schedtop
    commands: set[str] = set()
    if hooks is not None and hooks.is_on:
        commands = set(hooks.server._capabilities)
        operate(driver, commands, calls)
    driver.run_out()
    answer = {
        "is_attached": hooks is not None,
        "is_on": hooks is not None and hooks.is_on,
        "knobs": [spec.name for spec in hooks.table] if hooks is not None else [],
        "commands": sorted(commands),
        "said": log.lines,
        "failed": [str(call.error) for call in calls if call.error is not None],
        "preemptions": hooks.books.stats.preemptions if hooks is not None else 0,
        "num_tokens": driver.num_tokens,
        "ends": driver.ends,
        "seen": sorted(veil.seen),
    }
    scheduler.shutdown()
    logging.getLogger("vllm.schedtop").removeHandler(log)
    return answer


def fault() -> dict[str, Any]:
    """Our own counting fails while requests are held and a client watches."""
    from schedtop.control.discovery import socket_path
    from schedtop.control.vllm.plugin import SchedtopScheduler

    log = Log()
    scheduler = make_scheduler(SETTINGS, True, SchedtopScheduler)
    driver, hooks = Driver(scheduler, 1), scheduler.schedtop
    watching = Watching(str(socket_path("vllm")))
    watching.start()
    while watching.num_updates < 2:
        scheduler.has_requests()
    for i in range(NUM_REQUESTS):
        scheduler.add_request(make_request(f"r{i}", [10 + i] * 40, MAX_TOKENS, BLOCK, float(i)))
    for _ in range(5):
        driver.step()
    hooks.core.hold(["r2"])
    hooks.core.pause("keep")
    hooks.engine.boundary = None
    driver.run_out()
    watching.join()
    return {"num_tokens": driver.num_tokens, "on": hooks.is_on, "goodbye": watching.goodbye, "said": log.lines}


# ---- no system call -------------------------------------------------------------------------------------------

ALLOWED = {
    "futex": 202, "mmap": 9, "munmap": 11, "mprotect": 10, "brk": 12, "mremap": 25, "madvise": 28, "sched_yield": 24,
    "clock_gettime": 228, "exit": 60, "exit_group": 231, "rt_sigreturn": 15, "rt_sigprocmask": 14, "rt_sigaction": 13,
    "set_robust_list": 273, "rseq": 334, "gettid": 186, "getpid": 39, "tgkill": 234,
}  # fmt: skip
"""Locks, memory and the thread's own end, by their numbers on x86-64; and how the fault handler ends the process."""
ARCH_X86_64, WRITE, STDERR = 0xC000003E, 1, 2
RET_KILL, RET_TRAP, RET_ALLOW = 0x80000000, 0x00030000, 0x7FFF0000


def forbid_system_calls() -> None:
    """From here on, any other system call of this thread ends the process with SIGSYS."""
    load, is_equal, give = 0x20, 0x15, 0x06
    numbers = list(ALLOWED.values())
    program = [(load, 0, 0, 4), (is_equal, 1, 0, ARCH_X86_64), (give, 0, 0, RET_KILL), (load, 0, 0, 0)]
    tail = [(is_equal, 0, 2, WRITE), (load, 0, 0, 16), (is_equal, 1, 0, STDERR), (give, 0, 0, RET_TRAP)]
    to_allow = len(numbers) + len(tail)
    program += [(is_equal, to_allow - place - 1, 0, number) for place, number in enumerate(numbers)]
    program += [*tail, (give, 0, 0, RET_ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0, "no_new_privs"
    assert libc.prctl(22, 2, ctypes.create_string_buffer(header), 0, 0) == 0, f"seccomp: {ctypes.get_errno()}"


class Watching(threading.Thread):
    """A client that reads everything and turns a knob now and then."""

    def __init__(self, socket: str) -> None:
        super().__init__(daemon=True)
        self.num_updates = self.num_steps = self.num_changes = 0
        self.goodbye = ""
        self._socket = socket

    def run(self) -> None:
        from schedtop.control.client import Disconnected

        try:
            asyncio.run(self._watch())
        except Disconnected as gone:  # instead of an answer
            self.goodbye = str(gone)

    async def _watch(self) -> None:
        from schedtop.control.client import Client
        from schedtop.control.messages import Goodbye, SetKnobs, SnapshotUpdate, Subscribe

        async with await Client.connect(self._socket, name="test") as client:
            await client.request(Subscribe(interval_s=0.02, steps=True, events=True))
            async for message in client.messages():
                if isinstance(message, SnapshotUpdate):
                    self.num_updates += 1
                    self.num_steps += len(message.steps)
                    await client.request(SetKnobs(changes={"max_num_seqs": 3 + self.num_updates % 3}))
                    self.num_changes += 1
                elif isinstance(message, Goodbye):
                    self.goodbye = message.reason


def quiet(offends: bool) -> dict[str, Any]:
    """Steps, until a watcher has seen enough of them."""
    from schedtop.control.discovery import socket_path
    from schedtop.control.vllm.plugin import SchedtopScheduler

    faulthandler.register(signal.SIGSYS, chain=True)
    scheduler = make_scheduler({**SETTINGS, "num_blocks": 200}, True, SchedtopScheduler)
    driver = Driver(scheduler, 1)
    watching = Watching(str(socket_path("vllm")))
    done: list[int] = []

    def engine() -> None:
        for i in range(3):  # warm: what is imported or looked up once
            scheduler.add_request(make_request(f"w{i}", [5 + i] * 40, 4, BLOCK, float(i)))
        driver.run_out()
        forbid_system_calls()
        number = 0
        while watching.num_updates < 20:
            if not scheduler.has_requests():  # idle in between, where the control thread falls asleep
                number += 1
                for i in range(8):
                    name = f"r{number}-{i}"
                    scheduler.add_request(make_request(name, [9 + i] * 40, 30, BLOCK, float(i)))
            driver.step()
            if offends and number > 2:
                os.getppid()
        done.append(number)

    thread = threading.Thread(target=engine)
    watching.start()
    thread.start()
    thread.join()
    return {
        "rounds": done,
        "updates": watching.num_updates,
        "steps": watching.num_steps,
        "on": scheduler.schedtop.is_on,
    }


# ---- a long queue ---------------------------------------------------------------------------------------------


def policy() -> dict[str, Any]:
    """A queue longer than what is ever shown, through both policies."""
    from schedtop.control.vllm.plugin import SchedtopScheduler
    from schedtop.engine.snapshot import Viewport

    scheduler = make_scheduler({**SETTINGS, "num_blocks": 200}, True, SchedtopScheduler)
    for i in range(2500):
        scheduler.add_request(make_request(f"r{i}", [5] * 20, 2, BLOCK, float(i), priority=6 - i % 7))
    core, counts, firsts = scheduler.schedtop.core, [], []
    for name in ("priority", "fcfs"):
        core.set_knobs({"policy": name})
        counts.append(len(scheduler.waiting))
        firsts.append([row.request_id for row in core.snapshot(Viewport(waiting_rows=3)).waiting])
    return {"counts": counts, "firsts": firsts}


def main(case: str, *arguments: str) -> Any:
    prepare()
    logging.disable(logging.NOTSET)
    folder = tempfile.mkdtemp(prefix="st")
    os.environ["XDG_RUNTIME_DIR"] = os.environ["XDG_STATE_HOME"] = folder
    match case:
        case "reads":
            return scenario("reads", "")
        case "hide":
            return {name: scenario(f"h{i}", name) for i, name in enumerate(arguments)}
        case "quiet":
            return quiet(bool(arguments))
        case "policy":
            return policy()
        case "fault":
            return fault()
    raise SystemExit(f"no such case: {case}")


if __name__ == "__main__":
    answer = main(*sys.argv[1:])
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)
