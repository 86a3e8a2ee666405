"""What publishing costs a host's scheduler: `python bench/host_overhead.py [--out FILE]`.

Real requests go through vLLM's real scheduler classes; only the model is missing. Stock
AsyncScheduler and ObservedScheduler take turns in short rounds of one run, in random order. A step
is its arrivals, schedule() and update_from_output(); a round counts as its median step, or another
process on the core would be the measurement. `overhead_us` is observed minus stock, `inside_us`
what the added code takes by its own clock. Prints one JSON object; exit code 1 when the interval of
an overhead reaches above the target.
"""

import argparse
import gc
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from executor import ControlPage
from rose.stats import Estimate, paired_difference

TARGET_US = 30.0
RUNNING = 256
BLOCK_TOKENS = 16
PROMPT_TOKENS = 64
STEPS_A_ROUND = 10
FIRST_STEPS = 100
ROUNDS_A_COLLECTION = 10
VOCABULARY = 1_000


@dataclass(frozen=True, slots=True)
class Traffic:
    """A load. `output_tokens`: shortest and longest answer; one that ends makes room for the next.

    `in_flight`: steps scheduled ahead, 2 with asynchronous scheduling. `backlog`: requests that
    wait without a chance to run.
    """

    name: str
    output_tokens: tuple[int, int]
    in_flight: int
    backlog: int


TRAFFICS = (
    Traffic("steady", (100_000, 100_000), in_flight=1, backlog=0),
    Traffic("turnover", (50, 350), in_flight=2, backlog=0),
    Traffic("overload", (50, 350), in_flight=2, backlog=1_000),
)


class Engine:
    """One scheduler under load, and a model that answers every request with the same token."""

    def __init__(self, scheduler: Any, hasher: Any, traffic: Traffic) -> None:  # noqa: ANN401 - vLLM's
        self.scheduler = scheduler
        self._hasher = hasher
        self._traffic = traffic
        self._rng = random.Random(5)  # noqa: S311 # the same lengths for every engine
        self._names = count()
        self._flight: deque[Any] = deque()

    def steps(self, number: int) -> list[float]:
        """Wall seconds of each of `number` steps."""
        return [self._step() for _ in range(number)]

    def _step(self) -> float:
        fresh = [self._request() for _ in range(self._missing())]
        began_ns = time.perf_counter_ns()
        for request in fresh:
            self.scheduler.add_request(request)
        self._flight.append(self.scheduler.schedule())
        took_ns = time.perf_counter_ns() - began_ns
        if len(self._flight) >= self._traffic.in_flight:
            step = self._flight.popleft()
            sampled = self._sampled(step)
            began_ns = time.perf_counter_ns()
            self.scheduler.update_from_output(step, sampled)
            took_ns += time.perf_counter_ns() - began_ns
        return took_ns / 1e9

    def _missing(self) -> int:
        return RUNNING + self._traffic.backlog - len(self.scheduler.requests)

    def _request(self) -> Any:  # noqa: ANN401 - vLLM's Request
        from vllm import SamplingParams
        from vllm.v1.request import Request

        return Request(
            request_id=f"r{next(self._names)}",
            prompt_token_ids=[self._rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)],
            sampling_params=SamplingParams(
                max_tokens=self._rng.randint(*self._traffic.output_tokens), ignore_eos=True
            ),
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def _sampled(self, step: Any) -> Any:  # noqa: ANN401 - vLLM's ModelRunnerOutput
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(step.num_scheduled_tokens)
        requests = self.scheduler.requests
        tokens = [
            [7] if name in requests and not requests[name].is_prefill_chunk else []
            for name in names
        ]
        return ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, tokens)


def engine_config(folder: Path) -> Any:  # noqa: ANN401 - vLLM's VllmConfig
    """What vLLM makes of a small model's folder, as for a host of RUNNING sequences."""
    from vllm.engine.arg_utils import EngineArgs

    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1 << 20,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    made = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_num_seqs=RUNNING,
        max_num_batched_tokens=4096,
        block_size=BLOCK_TOKENS,
    ).create_engine_config()
    made.cache_config.num_gpu_blocks = 1 << 18
    return made


def scheduler_of(kind: Callable[..., Any], config: Any) -> Any:  # noqa: ANN401 - vLLM's
    """A scheduler with the cache of one layer: its blocks are counted, never touched."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    layer = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.bfloat16
    )
    cache = KVCacheConfig(
        config.cache_config.num_gpu_blocks, [], [KVCacheGroupSpec(["layer"], layer)]
    )
    return kind(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_TOKENS,
        log_stats=True,
    )


def block_hasher(config: Any) -> Any:  # noqa: ANN401 - vLLM's
    """Names for full blocks, as the engine core makes them for prefix caching."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    return get_request_block_hasher(BLOCK_TOKENS, hash_fn)


def engines_of(folder: Path, traffic: Traffic, config: Any) -> tuple[Engine, Engine]:  # noqa: ANN401 - vLLM's
    """A stock engine and one whose scheduler publishes to a page of its own."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from executor.vllm.host import ObservedScheduler

    page = folder / f"page-{traffic.name}"
    os.environ |= {
        "ROSE_ROLE": "host",
        "ROSE_CONTROL_PAGE": str(page),
        "ROSE_SLO_TTFT_S": "0.5",
        "ROSE_SLO_TPOT_S": "0.15",
    }
    hasher = block_hasher(config)
    stock, observed = (
        Engine(scheduler_of(kind, config), hasher, traffic)
        for kind in (AsyncScheduler, ObservedScheduler)
    )
    for engine in (stock, observed):
        engine.steps(FIRST_STEPS)
    with ControlPage.open(page) as published:
        state = published.host.peek()
    if state is None or state.running != RUNNING:
        raise SystemExit(f"the host section does not tell of {RUNNING} running requests: {state}")
    return stock, observed


def timed_inside(engine: Engine, steps: int) -> float:
    """Median seconds of a step that the scheduler spends in what ROSE added, by its own clock."""
    spent_ns = 0
    quietly = engine.scheduler._quietly

    def timed(observe: Callable[..., None], *args: object) -> None:
        nonlocal spent_ns
        began_ns = time.perf_counter_ns()
        quietly(observe, *args)
        spent_ns += time.perf_counter_ns() - began_ns

    engine.scheduler._quietly = timed
    spent = []
    for _ in range(steps):
        spent_ns = 0
        engine.steps(1)
        spent.append(spent_ns / 1e9)
    del engine.scheduler._quietly
    return median(spent)


def measured(traffic: Traffic, rounds: int, folder: Path, config: Any) -> dict[str, object]:  # noqa: ANN401 - vLLM's
    """Figures of one load, microseconds a step."""
    stock, observed = engines_of(folder, traffic, config)
    order = random.Random(11)  # noqa: S311 # an order, not a secret
    pairs, inside = [], []
    for number in range(rounds):
        if number % ROUNDS_A_COLLECTION == 0:
            gc.collect()
        arms = [("observed", observed), ("stock", stock)]
        order.shuffle(arms)
        took = {name: median(engine.steps(STEPS_A_ROUND)) * 1e6 for name, engine in arms}
        pairs.append((took["observed"], took["stock"]))
        inside.append(timed_inside(observed, STEPS_A_ROUND) * 1e6)
        stock.steps(STEPS_A_ROUND)  # Both arms stay at the same age.
    return {
        "overhead_us": estimate(pairs),
        "inside_us": estimate([(spent, 0.0) for spent in inside]),
        "stock_step_us": round(median(pair[1] for pair in pairs), 1),
        "observed_step_us": round(median(pair[0] for pair in pairs), 1),
        "in_flight": traffic.in_flight,
        "waiting": traffic.backlog,
    }


def estimate(pairs: Sequence[tuple[float, float]]) -> dict[str, object]:
    """Mean difference of the rounds' pairs with its 95% bootstrap interval."""
    made: Estimate = paired_difference([[pair] for pair in pairs], seed=3)
    low_high = None if made.ci95 is None else [round(bound, 2) for bound in made.ci95]
    return {"mean": round(made.value, 2), "ci95": low_high}


def within_target(figures: dict[str, object]) -> bool:
    """Whether the whole interval of wall time is at or below the target."""
    overhead = figures["overhead_us"]
    assert isinstance(overhead, dict)
    return overhead["ci95"] is not None and overhead["ci95"][1] <= TARGET_US


def main() -> int:
    """Measure, and print or write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path, help="write there instead of to the screen")
    arguments = parser.parse_args()
    # Collections fall between rounds: vLLM freezes its heap for the same reason.
    gc.disable()
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_PLUGINS": ""}
    with tempfile.TemporaryDirectory(prefix="rose-host-overhead-") as name:
        config = engine_config(Path(name))
        loads = {
            traffic.name: measured(traffic, arguments.rounds, Path(name), config)
            for traffic in TRAFFICS
        }
    holds = all(within_target(figures) for figures in loads.values())
    report = {
        "running": RUNNING,
        "target_us": TARGET_US,
        "holds": holds,
        "rounds": arguments.rounds,
        "steps_a_round": STEPS_A_ROUND,
        "loads": loads,
        "machine": {
            "python": platform.python_version(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "load_1min": os.getloadavg()[0],
        },
    }
    text = json.dumps(report, indent=2) + "\n"
    if arguments.out is None:
        sys.stdout.write(text)
    else:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text, encoding="utf-8")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
