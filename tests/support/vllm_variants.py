"""The plugin for tests on a small machine: vLLM's engine thread sleeps where it would spin.

Waiting for its worker process, vLLM's engine thread gives the GIL away and takes it back thousands of times a second;
where the worker keeps the other core busy, no other thread of the process gets its turn for seconds.
"""

import time
from typing import Any

from vllm.distributed.device_communicators import shm_broadcast

from schedtop.control.vllm.plugin import SchedtopScheduler

WAIT_S = 0.0001


class SyncVariant(SchedtopScheduler):
    """As vLLM schedules on a CPU."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        shm_broadcast.sched_yield = lambda: time.sleep(WAIT_S)
        super().__init__(vllm_config, *args, **kwargs)


class AsyncVariant(SyncVariant):
    """Results come a step late, as on a GPU: vLLM's CPU platform turns that off; back on before vLLM reads it."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        vllm_config.scheduler_config.async_scheduling = True
        super().__init__(vllm_config, *args, **kwargs)
