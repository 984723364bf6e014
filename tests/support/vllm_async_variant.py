"""The plugin in async mode on a CPU, where vLLM's platform turns async scheduling off: put back before vLLM reads it.

For `vllm serve --scheduler-cls vllm_async_variant.AsyncVariant`, in tests only.
"""

from typing import Any

from schedtop.control.vllm.plugin import SchedtopScheduler


class AsyncVariant(SchedtopScheduler):
    """Results come a step late, as on a GPU."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        vllm_config.scheduler_config.async_scheduling = True
        super().__init__(vllm_config, *args, **kwargs)
