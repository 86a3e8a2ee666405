"""Expositions as engines write them."""

from collections.abc import Mapping, Sequence


def histogram(name: str, labels: str, counts: Mapping[str, int], total_s: float = 0.0) -> str:
    """One label set of one histogram: cumulative `counts` by bound, ended by +Inf."""
    lines = [f"# HELP {name} Histogram.", f"# TYPE {name} histogram"]
    lines += [f'{name}_bucket{{{labels},le="{le}"}} {count}.0' for le, count in counts.items()]
    lines += [f"{name}_count{{{labels}}} {counts['+Inf']}.0", f"{name}_sum{{{labels}}} {total_s}"]
    return "\n".join(lines)


def gauge(name: str, values: Mapping[str, float]) -> str:
    """One gauge with a value for each label set."""
    samples = [f"{name}{{{labels}}} {value}" for labels, value in values.items()]
    return "\n".join([f"# HELP {name} Gauge.", f"# TYPE {name} gauge", *samples])


def page(parts: Sequence[str]) -> str:
    """An exposition with something unrelated before and after."""
    other = '# TYPE python_info gauge\npython_info{version="3.11"} 1.0'
    created = "# TYPE http_requests_created gauge\nhttp_requests_created 1.7e9"
    return "\n".join([other, *parts, created]) + "\n"


def vllm(requests: int = 10, started_s: float = 1.7e9, model: str = "m", engine: str = "0") -> str:
    """vLLM 0.32 after `requests` requests, each of ten gaps."""
    labels = f'engine="{engine}",model_name="{model}"'
    half = {"0.5": requests // 2, "1.0": requests, "+Inf": requests}
    gaps = {"0.05": 9 * requests, "0.1": 10 * requests, "+Inf": 10 * requests}
    return page(
        [
            f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {started_s}",
            histogram("vllm:time_to_first_token_seconds", labels, half, 0.6 * requests),
            histogram("vllm:inter_token_latency_seconds", labels, gaps),
            histogram("vllm:request_time_per_output_token_seconds", labels, half),
            histogram("vllm:e2e_request_latency_seconds", labels, half),
            gauge("vllm:num_requests_running", {labels: 3}),
            gauge("vllm:num_requests_waiting", {labels: 2}),
            gauge("vllm:num_requests_waiting_by_reason", {labels + ',reason="capacity"': 2}),
            gauge("vllm:kv_cache_usage_perc", {labels: 0.25}),
            f"# TYPE vllm:prompt_tokens counter\nvllm:prompt_tokens_total{{{labels}}} 99.0",
        ]
    )


def old_vllm() -> str:
    """vLLM 0.8: gaps under the former name, and the former name of KV usage."""
    labels = 'model_name="m"'
    return page(
        [
            histogram("vllm:time_to_first_token_seconds", labels, {"1.0": 4, "+Inf": 4}),
            histogram("vllm:time_per_output_token_seconds", labels, {"0.1": 40, "+Inf": 40}),
            histogram("vllm:e2e_request_latency_seconds", labels, {"1.0": 4, "+Inf": 4}),
            gauge("vllm:num_requests_running", {labels: 1}),
            gauge("vllm:num_requests_waiting", {labels: 0}),
            gauge("vllm:num_requests_swapped", {labels: 0}),
            gauge("vllm:gpu_cache_usage_perc", {labels: 0.5}),
        ]
    )


def sglang() -> str:
    """SGLang: latencies split by streaming, two data-parallel engines of two ranks, priorities."""
    names = 'engine_type="unified",model_name="m"'
    streams = [f'{names},is_streaming="{answer}"' for answer in ("true", "false")]
    queues = {
        f'{names},dp_rank="{dp}",tp_rank="{tp}",priority="{priority}"': reqs
        for dp in (0, 1)
        for tp in (0, 1)
        for priority, reqs in (("", 5), ("0", 2), ("7", 3))
    }
    return page(
        [
            *(
                histogram("sglang:time_to_first_token_seconds", s, {"0.4": 3, "+Inf": 4}, 1.5)
                for s in streams
            ),
            histogram("sglang:inter_token_latency_seconds", names, {"0.04": 70, "+Inf": 80}),
            histogram("sglang:e2e_request_latency_seconds", streams[0], {"1": 2, "+Inf": 4}),
            gauge("sglang:num_running_reqs", queues),
            gauge("sglang:num_queue_reqs", {names: 1}),
            gauge(
                "sglang:token_usage",
                {f'{names},dp_rank="0"': 0.2, f'{names},dp_rank="1"': 0.9},
            ),
            gauge("sglang:fwd_occupancy", {names: float("nan")}),
        ]
    )
