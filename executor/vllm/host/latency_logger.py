"""Stat-logger plugin `rose_host`: each finished request's latencies, into a lane of the ring."""

import logging
import os
import time

from vllm.v1.metrics.loggers import StatLoggerBase

from executor.control_page.latency_ring import LatencyLane
from executor.control_page.page import ControlPage
from executor.control_page.seqlock_records import LatencyRecord
from executor.errors import ExecutorError
from executor.vllm.compat import FinishedSurface, IterationSurface, client_request_id
from executor.vllm.settings import HOST, EngineSettings

logger = logging.getLogger("vllm.rose.latency")
UNPUBLISHED = "request latencies are not published; the host serves on"


def latency_record(finished: FinishedSurface, finished_ns: int) -> LatencyRecord:
    """Record of vLLM's FinishedRequestStats; TTFT is what end-to-end leaves beside decoding."""
    e2e_ns = round(finished.e2e_latency * 1e9)
    return LatencyRecord(
        request_id=client_request_id(finished.request_id or ""),
        finished_ns=finished_ns,
        ttft_ns=max(0, e2e_ns - round(finished.decode_time * 1e9)),
        tpot_ns=round(finished.mean_time_per_output_token * 1e9),
        e2e_ns=e2e_ns,
        prompt_tokens=finished.num_prompt_tokens,
        output_tokens=finished.num_generation_tokens,
    )


class HostLatencyLogger(StatLoggerBase):  # type: ignore[misc] # vLLM's types are not ours to check
    """Appends one record per finished request; inert unless ROSE_ROLE=host.

    Each API process of a host has a logger, and with it a lane of its own.
    """

    def __init__(self, vllm_config: object, engine_index: int = 0) -> None:
        del vllm_config, engine_index
        self._lane: LatencyLane | None = None
        try:
            settings = EngineSettings.from_environ(os.environ)
            if settings.role == HOST:
                page = ControlPage.ensure(settings.page_path, settings.page_group)
                self._lane = page.take_lane()
        except ExecutorError as error:
            logger.error("%s: %s", UNPUBLISHED, error)  # noqa: TRY400 -- one line says it all
        except Exception:
            logger.exception(UNPUBLISHED)

    def record(
        self,
        scheduler_stats: object,
        iteration_stats: IterationSurface | None,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        """Publish the requests that finished in this iteration.

        A request that ended before its first token has no latency to report and is left out.
        """
        if self._lane is None or iteration_stats is None:
            return
        try:
            now_ns = time.monotonic_ns()
            for finished in iteration_stats.finished_requests:
                if finished.num_generation_tokens > 0:
                    self._lane.append(latency_record(finished, now_ns))
        except Exception:
            self._lane = None
            logger.exception(UNPUBLISHED)

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
