"""What engines call the same thing in their `/metrics`, newest name first.

vLLM: `vllm/v1/metrics/loggers.py`. Until 0.10 its `time_per_output_token_seconds` held the gaps
between tokens, not each request's mean; 0.11 renamed it to `inter_token_latency_seconds`, and the
per-request mean came as `request_time_per_output_token_seconds`. SGLang:
`sglang/srt/observability/metrics_collector.py`, before that `sglang/srt/metrics/collector.py`;
its gaps were `time_per_output_token_seconds` until 0.4.2, and it has no per-request mean yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class EngineNames:
    """Names under which one engine's versions export each quantity."""

    engine: str
    ttft: tuple[str, ...]
    tpot: tuple[str, ...]
    itl: tuple[str, ...]
    e2e: tuple[str, ...]
    running: tuple[str, ...]
    waiting: tuple[str, ...]
    kv_usage: tuple[str, ...]

    def of(self, quantity: str) -> tuple[str, ...]:
        """Names of `quantity`, newest first."""
        names: tuple[str, ...] = getattr(self, quantity)
        return names


HISTOGRAMS: Final = ("ttft", "tpot", "itl", "e2e")
GAUGES: Final = ("running", "waiting", "kv_usage")
STARTED: Final = "process_start_time_seconds"

ENGINES: Final = (
    EngineNames(
        engine="vllm",
        ttft=("vllm:time_to_first_token_seconds",),
        tpot=("vllm:request_time_per_output_token_seconds",),
        itl=("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
        e2e=("vllm:e2e_request_latency_seconds",),
        running=("vllm:num_requests_running",),
        waiting=("vllm:num_requests_waiting",),
        kv_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    ),
    EngineNames(
        engine="sglang",
        ttft=("sglang:time_to_first_token_seconds",),
        tpot=("sglang:request_time_per_output_token_seconds",),
        itl=("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
        e2e=("sglang:e2e_request_latency_seconds",),
        running=("sglang:num_running_reqs",),
        waiting=("sglang:num_queue_reqs",),
        kv_usage=("sglang:token_usage",),
    ),
)


def _quantities() -> dict[str, tuple[str, str]]:
    return {
        name: (names.engine, quantity)
        for names in ENGINES
        for quantity in (*HISTOGRAMS, *GAUGES)
        for name in names.of(quantity)
    }


QUANTITIES: Final[Mapping[str, tuple[str, str]]] = _quantities()
"""Engine and quantity of every known name."""
