"""vLLM's own scheduler in a process of another Python, as a peer for our scheduler's benchmark.

Only starts `scheduler_alone.py` and talks to it; nothing here imports vLLM.
"""

import importlib.util
import subprocess
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from threading import Thread
from types import TracebackType
from typing import Any, Self

import msgspec

from schedtop.engine.errors import SchedtopError
from schedtop.engine.sim.bench_scheduler import BLOCK_SIZE, FOREVER, LONG_PROMPT, PROMPT, Workload


class PeerFailed(SchedtopError):
    """The other Python has no usable vLLM, or its scheduler failed."""


class VllmProcess:
    """A Python with vLLM that times its scheduler for us. A context manager: the process ends with it.

    Raises `PeerFailed` with the last lines that the process wrote.
    """

    def __init__(self, python: str) -> None:
        self._python = python
        self._last_words: deque[str] = deque(maxlen=6)
        script = importlib.util.find_spec("schedtop.control.vllm.scheduler_alone")
        assert script is not None and script.origin is not None
        try:
            self._process = subprocess.Popen(
                [python, script.origin],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            way_out = "give the path of a Python that has vLLM"
            raise PeerFailed(f"{python} can't be run ({error.strerror}): {way_out}") from None
        self._listener = Thread(target=self._listen, daemon=True)
        self._listener.start()
        try:
            self.version = str(self._read()["version"])
        except PeerFailed:
            self.close()
            raise

    def _listen(self) -> None:
        assert self._process.stderr is not None
        self._last_words.extend(self._process.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._listener.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                with suppress(BrokenPipeError):  # what it never read goes with it
                    pipe.close()

    def ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a request and wait for its answer."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # reading tells why
            self._process.stdin.write(msgspec.json.encode(request).decode() + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._listener.join()
            words = "".join(self._last_words).strip() or "it said nothing"
            raise PeerFailed(f"vLLM's scheduler under {self._python} ended: {words}")
        answer: Mapping[str, Any] = msgspec.json.decode(line)
        return answer


class VllmScheduler:
    """vLLM's scheduler under a workload (a `Peer`), settled."""

    def __init__(self, process: VllmProcess, workload: Workload) -> None:
        self._process = process
        settings = {
            "block_size": BLOCK_SIZE,
            "num_blocks": workload.num_blocks,
            "max_num_batched_tokens": workload.budget,
            "max_num_seqs": workload.num_seqs,
            "max_model_len": 2 * FOREVER,
            "policy": workload.policy,
            "async_scheduling": workload.is_async,
        }
        sizes = {
            "settings": settings,
            "prompt": PROMPT,
            "long_prompt": LONG_PROMPT,
            "forever": FOREVER,
            "settling_steps": workload.settling_steps,
        }
        process.ask({"workload": msgspec.structs.asdict(workload), "sizes": sizes})

    def steps(self, count: int) -> list[float]:
        """See `Peer`."""
        return self._measure("steps", count)

    def aborts(self, count: int) -> list[float]:
        """See `Peer`."""
        return self._measure("aborts", count)

    def priority_changes(self, count: int) -> list[float]:
        """See `Peer`."""
        return self._measure("priority_changes", count)

    def _measure(self, what: str, count: int) -> list[float]:
        seconds: list[float] = self._process.ask({"do": what, "count": count})["seconds"]
        return seconds

    def close(self) -> None:
        """Nothing to do: the next workload takes its place."""
