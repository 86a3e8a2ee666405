"""General plugin `rose_host` of vLLM: ROSE_ROLE=host alone makes the scheduler the observing one.

vLLM loads it in each of its processes, before it asks its configuration for the scheduler's class.
A class that `--scheduler-cls` names, and the one that vLLM has for diffusion models, stay.

An engine core of a dense model has a configuration that no longer says how many cores its host has.
So the process that starts them writes their number into the configuration that each receives.
"""

import functools
import logging
import os
from typing import Any, Final

from executor.engine_settings import HOST
from executor.errors import PageError

ENGINE_CORES: Final = "rose_engine_cores"
"""Attribute of vLLM's ParallelConfig: engine cores started on this machine, and of all."""

# vLLM shows the lines of its own loggers' children.
logger = logging.getLogger("vllm.rose.host")


def register() -> None:
    """Have vLLM take `ObservedScheduler` where no class is named; inert unless ROSE_ROLE=host.

    An error is logged, and the host serves on with vLLM's own scheduler.
    """
    if os.environ.get("ROSE_ROLE") != HOST:
        return
    try:
        _observe()
    except Exception:
        logger.exception("vLLM's scheduler stays its own; the host serves on without ROSE")


def _observe() -> None:
    from vllm.config.scheduler import SchedulerConfig

    from executor.vllm.host.scheduler import ObservedScheduler

    stock = SchedulerConfig.get_scheduler_cls

    @functools.wraps(stock)
    def get_scheduler_cls(config: Any) -> type:  # noqa: ANN401 -- vLLM's
        return ObservedScheduler if config.scheduler_cls is None else stock(config)

    SchedulerConfig.get_scheduler_cls = get_scheduler_cls
    from vllm.v1.engine.utils import CoreEngineProcManager

    start = CoreEngineProcManager.__init__

    @functools.wraps(start)
    def counted_start(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 -- vLLM's
        parallel = kwargs["vllm_config"].parallel_config
        local = kwargs["local_engine_count"], parallel.data_parallel_size
        object.__setattr__(parallel, ENGINE_CORES, local)
        start(self, *args, **kwargs)

    CoreEngineProcManager.__init__ = counted_start


def engine_core_of(parallel: Any) -> tuple[int, int]:  # noqa: ANN401 -- vLLM's ParallelConfig
    """Return the number of this engine core, and the number of its host's engine cores.

    Raises PageError if not all of them are processes that one vLLM on this machine started.
    """
    core = getattr(parallel, "data_parallel_index", 0)
    started, cores = getattr(
        parallel, ENGINE_CORES, (0, max(parallel.data_parallel_size, core + 1))
    )
    if cores == 1 and core == 0:
        return 0, 1
    if started != cores or getattr(parallel, "enable_elastic_ep", False):
        raise PageError(
            f"this is rank {core} of a host with data_parallel_size {cores}, and not all ranks are"
            " processes of one vLLM server here, or their number may change: they cannot share a"
            " page; start each as a server of its own with its own page"
        )
    return core, cores


def warn_of_scheduler(chosen: type) -> None:
    """Log a warning if the scheduler's class is not ROSE's: such a host publishes nothing."""
    if "ObservedScheduler" not in [base.__name__ for base in chosen.__mro__]:
        logger.warning(
            "this host's scheduler is %s, so no guest can run beside it; start it without"
            " --scheduler-cls, and with rose_host in VLLM_PLUGINS where that is set",
            chosen.__qualname__,
        )
