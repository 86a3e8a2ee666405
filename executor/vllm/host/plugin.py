"""General plugin `rose_host` of vLLM: ROSE_ROLE=host alone makes the scheduler the observing one.

vLLM loads it in each of its processes, before it asks its configuration for the scheduler's class.
A class that `--scheduler-cls` names, and the one that vLLM has for diffusion models, stay.
"""

import functools
import logging
import os
from typing import Any

from executor.engine_settings import HOST

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


def warn_of_scheduler(chosen: type) -> None:
    """Log a warning if the scheduler's class is not ROSE's: such a host publishes nothing."""
    if "ObservedScheduler" not in [base.__name__ for base in chosen.__mro__]:
        logger.warning(
            "this host's scheduler is %s, so no guest can run beside it; start it without"
            " --scheduler-cls, and with rose_host in VLLM_PLUGINS where that is set",
            chosen.__qualname__,
        )
