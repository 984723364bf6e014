"""Which system calls the engine's thread makes while it is watched: none that tell anybody anything.

The thread runs under a seccomp filter (its own, other threads don't have it) that lets pass what memory, time, locks
and the end of a thread take, and reports every other call by SIGSYS: writes, sends, reads, polls, opens. What this
doesn't see: a lock that is waited for (futex), which is how Python hands the interpreter from thread to thread.
"""

import json
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e

_SCRIPT = """
import asyncio, ctypes, json, os, shutil, signal, struct, sys, tempfile
from pathlib import Path
from schedtop.control.audit import AuditLog
from schedtop.control.client import Client
from schedtop.control.messages import EngineInfo, SetKnobs, SetPriority, RequestFilter, Subscribe, AddRequest
from schedtop.control.server import ControlServer
from schedtop.engine.config import EngineConfig
from schedtop.engine.core import EngineCore
from schedtop.engine.loop import EngineLoop
from schedtop.engine.runner.simulated import SimulatedRunner
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sim.step_model import StepModel
from schedtop.engine.snapshot import Viewport

PASSED = {
    "x86_64": (9, 10, 11, 12, 13, 14, 15, 24, 25, 28, 35, 39, 60, 186, 202, 219, 228, 230, 231, 234, 273, 324, 334),
    "aarch64": (93, 94, 98, 99, 101, 113, 115, 124, 128, 131, 134, 135, 139, 172, 178, 214, 215, 216, 222, 226, 233,
                283, 293),
}
# mmap mprotect munmap brk rt_sig* sched_yield mremap madvise nanosleep getpid exit gettid futex restart_syscall
# clock_gettime clock_nanosleep exit_group tgkill set_robust_list membarrier rseq
LOAD, EQUAL, RETURN, ALLOW, TRAP = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00030000
seen = []


def filter_calls(numbers):
    code = [(LOAD, 0, 0, 0)]
    code += [(EQUAL, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    code += [(RETURN, 0, 0, TRAP), (RETURN, 0, 0, ALLOW)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    head = struct.pack("HxxxxxxP", len(code), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, head, 0, 0) == 0, ctypes.get_errno()


async def watched(path, engine):
    async with await Client.connect(path, name="w") as client, await Client.connect(path, name="o") as owner:
        for number in range(50):
            await owner.request(AddRequest(request_id=f"r{number}", prompt_token_ids=[1] * 20,
                                           sampling=SamplingParams(max_tokens=100_000)))
        await client.request(Subscribe(interval_s=0.02, viewport=Viewport(kv_cells=400)))
        engine.submit(lambda core: filter_calls(PASSED[sys.argv[1]]), lambda call: None)
        first = engine.core.scheduler.step
        while engine.core.scheduler.step < first + 300:
            await client.request(SetKnobs(changes={"max_num_seqs": 40 + engine.core.scheduler.step % 9}))
            await client.request(SetPriority(select=RequestFilter(ids=["r3"]), priority=engine.core.scheduler.step % 5))
        told = len(seen)
        engine.watcher_parked = True  # the one call there is: waking a server that sleeps
        first = engine.core.scheduler.step
        while engine.core.scheduler.step < first + 5:
            await asyncio.sleep(0.01)
    return {"calls": told, "with a sleeping server": len(seen)}


def main():
    signal.signal(signal.SIGSYS, lambda number, frame: seen.append(number))
    config = EngineConfig(num_kv_blocks=5000, max_num_batched_tokens=1024, max_num_seqs=64, max_model_len=1 << 20)
    core = EngineCore(config, SimulatedRunner(StepModel(base_s=0.001, per_sequence_s=0.0, per_prefill_token_s=0.0)))
    engine = EngineLoop(core)
    with tempfile.TemporaryDirectory(prefix="st-") as folder:
        audit = AuditLog(Path(folder) / "a.sqlite")
        server = ControlServer(engine, EngineInfo(name="e", model="", boot_id="b", pid=0, version=""),
                               core.knob_table, audit)
        engine.start()
        server.start(Path(folder) / "e.sock")
        print(json.dumps(asyncio.run(watched(f"{folder}/e.sock", engine))), flush=True)
        shutil.rmtree(folder)
        os._exit(0)  # an end in good order would be one of the calls that the thread may not make


main()
"""


def test_watchers_and_commands_make_the_engine_thread_call_nobody_while_steps_run():
    command = [sys.executable, "-P", "-c", _SCRIPT, platform.machine()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["calls"] == 0
    assert told["with a sleeping server"] > 0, "the filter reports nothing: this test proves nothing"
