"""Stat-logger plugin `rose_host`: each finished request's latencies, into a lane of the ring."""

import functools
import logging
import os
import time
from typing import Any, Final

from vllm.v1.engine import FinishReason
from vllm.v1.metrics.loggers import StatLoggerBase

from executor.control_page.seqlock_records import LatencyRecord
from executor.engine_settings import HOST
from executor.host.plugin import LatencyWriter
from executor.vllm.compat import (
    FinishedSurface,
    IterationSurface,
    client_request_id,
    decodes_only,
)
from executor.vllm.host.plugin import warn_of_scheduler

logger = logging.getLogger("vllm.rose.latency")
_PLACE: Final = ("ROSE_ROLE", "ROSE_CONTROL_PAGE", "ROSE_HOST_DIR", "ROSE_HOST_NAME")


def latency_record(
    finished: FinishedSurface, finished_ns: int, *, prefilled: bool = True
) -> LatencyRecord:
    """Return the latency record of a request's statistics; TTFT is end-to-end less decoding.

    A pooling request has no output tokens: its answer counts as the first one. `prefilled`: False
    if another host computed the prompt, so that TTFT is not this host's.
    """
    e2e_ns = round(finished.e2e_latency * 1e9)
    ttft_ns = max(0, e2e_ns - round(finished.decode_time * 1e9))
    return LatencyRecord(
        request_id=client_request_id(finished.request_id or ""),
        finished_ns=finished_ns,
        ttft_ns=ttft_ns if prefilled else 0,
        tpot_ns=round(finished.mean_time_per_output_token * 1e9),
        e2e_ns=e2e_ns,
        prompt_tokens=finished.num_prompt_tokens,
        output_tokens=finished.num_generation_tokens,
    )


@functools.cache
def _writer_of(_process: int, _place: tuple[str | None, ...]) -> LatencyWriter:
    # vLLM makes a logger for each engine core, and a page has few lanes.
    return LatencyWriter(logger)


class HostLatencyLogger(StatLoggerBase):  # type: ignore[misc] # vLLM's types are not ours to check
    """Stat logger of vLLM that publishes the latencies of each finished request.

    Inert unless ROSE_ROLE=host.
    """

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:  # noqa: ANN401 -- vLLM's
        del engine_index
        self._writer = _writer_of(os.getpid(), tuple(map(os.environ.get, _PLACE)))
        self._prefills = vllm_config is None or not decodes_only(vllm_config)
        if os.environ.get("ROSE_ROLE") == HOST and vllm_config is not None:
            warn_of_scheduler(vllm_config.scheduler_config.get_scheduler_cls())

    def record(
        self,
        scheduler_stats: object,
        iteration_stats: IterationSurface | None,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        """Publish latencies of the requests that finished in this iteration.

        A request that was aborted before its first token has no latency, and is left out.
        """
        if iteration_stats is None:
            return
        self._writer.append(
            lambda: [
                latency_record(finished, time.monotonic_ns(), prefilled=self._prefills)
                for finished in iteration_stats.finished_requests
                if finished.num_generation_tokens > 0 or finished.finish_reason is FinishReason.STOP
            ]
        )

    def log_engine_initialized(self) -> None:
        """Do nothing; vLLM requires the method."""
