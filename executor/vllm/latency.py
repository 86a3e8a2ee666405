"""Stat-logger plugin `rose_host`: each finished request's latencies, into the latency ring."""

import logging
import os
import re
import time

from vllm.v1.metrics.loggers import StatLoggerBase

from executor.control_page import ControlPage
from executor.sections import LatencyRecord
from executor.vllm.settings import HOST, EngineSettings
from executor.vllm.surfaces import FinishedSurface, IterationSurface

logger = logging.getLogger("vllm.rose.latency")

# cmpl-<X-Request-Id>-<prompt index>, chatcmpl-<X-Request-Id>; some versions add 8 random digits.
_COMPLETION = re.compile(r"cmpl-(?P<id>.+)-(?P<index>\d{1,4})(?:-[0-9a-f]{8})?")
_CHAT = re.compile(r"chatcmpl-(?P<id>.+)")


def client_request_id(engine_request_id: str) -> str:
    """The X-Request-Id that a client sent, from the id that vLLM made of it.

    Further prompts of one completion request keep their index (`id-1`, `id-2`, …).
    """
    if match := _COMPLETION.fullmatch(engine_request_id):
        index = int(match["index"])
        return match["id"] if index == 0 else f"{match['id']}-{index}"
    if match := _CHAT.fullmatch(engine_request_id):
        return match["id"]
    return engine_request_id


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
    """Appends one record per finished request; inert unless ROSE_ROLE=host."""

    def __init__(self, vllm_config: object, engine_index: int = 0) -> None:
        del vllm_config, engine_index
        self._page: ControlPage | None = None
        try:
            settings = EngineSettings.from_environ(os.environ)
            if settings.role == HOST:
                self._page = ControlPage.ensure(settings.page_path)
        except Exception:
            logger.exception("request latencies are not published; the host serves on")

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
        if self._page is None or iteration_stats is None:
            return
        try:
            now_ns = time.monotonic_ns()
            for finished in iteration_stats.finished_requests:
                if finished.num_generation_tokens > 0:
                    self._page.latency.append(latency_record(finished, now_ns))
        except Exception:
            self._page = None
            logger.exception("request latencies are no longer published; the host serves on")

    def log_engine_initialized(self) -> None:
        """Nothing to say."""
