"""Cost of publishing to a host's scheduler.

    python -m bench.micro.host_overhead [--tensor-parallel-size 8] [--out FILE]

Real requests go through vLLM's real scheduler classes; only the model is missing. A step is its
arrivals, schedule() and update_from_output(). Stock AsyncScheduler and ObservedScheduler run in
turns, in processes of their own: in one, Python would specialise the code they share for whichever
came first. A round counts as its median step, or another process on the core would be the
measurement. `overhead_us` is observed minus stock; `inside_us`, what the added code takes by its
own clock, is held against the target: where a process's memory lies moves a step by more than that,
which is why several pairs of processes run and intervals are taken over them. Over several ranks
the host lends, and a load more has pages on their way: between any two steps each rank reports
other figures. It takes four minutes on two cores. Prints one JSON object; exit code 1 when an
interval of `inside_us` reaches above the target.
"""

import argparse
import gc
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count, repeat
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from bench.common.processes import BenchProcess, python
from bench.common.report import parser_of, put_judged
from bench.common.tiny_models import TinyModel
from executor import ControlPage
from executor.control_page.page import PAGE_FOLDER
from executor.kv.backing import NoPages
from executor.kv.rank_pages import RankPager, RankPages
from executor.kv.shrink_plan import Granules
from executor.vllm.rank_worker import OPERATIONS
from rose.compare.bootstrap import Estimate, paired_difference

TARGET_US = 30.0
RUNNING = 256
BLOCK_TOKENS = 16
PROMPT_TOKENS = 64
BLOCKS, KV_BYTES = 1 << 18, 16 << 30
GRANULES = Granules(BLOCKS, 32)
CORES = sorted(os.sched_getaffinity(0))
# Long enough that the caches are its own again for most of a round.
STEPS_A_ROUND = 40
# Processes of each arm.
PROCESSES = 5
FIRST_STEPS = 100
KINDS = ("stock", "observed", "timed")
VOCABULARY = 1_000
MODULE = "bench.micro.host_overhead"
ENVIRONMENT = {
    "ROSE_ROLE": "host",
    "ROSE_SLO_TTFT_S": "0.5",
    "ROSE_SLO_TPOT_S": "0.15",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class OverheadTraffic:
    """A load. `output_tokens`: shortest and longest answer; one that ends makes room for the next.

    `in_flight`: steps scheduled ahead, 2 with asynchronous scheduling. `backlog`: requests that
    wait without a chance to run. `moving`: each rank reports other figures after every step.
    """

    name: str
    output_tokens: tuple[int, int]
    in_flight: int
    backlog: int
    moving: bool = False


TRAFFICS = (
    OverheadTraffic("steady", (100_000, 100_000), in_flight=1, backlog=0),
    OverheadTraffic("turnover", (50, 350), in_flight=2, backlog=0),
    OverheadTraffic("overload", (50, 350), in_flight=2, backlog=1_000),
    OverheadTraffic("moving", (100_000, 100_000), in_flight=1, backlog=0, moving=True),
)


class VllmSteps:
    """One scheduler under load, and a model that answers every request with the same token."""

    def __init__(
        self,
        scheduler: Any,  # noqa: ANN401 - vLLM's
        hasher: Any,  # noqa: ANN401 - vLLM's
        traffic: OverheadTraffic,
        ranks: Connection | None = None,
    ) -> None:
        self.scheduler = scheduler
        self._ranks = ranks
        self._hasher = hasher
        self._traffic = traffic
        self._rng = random.Random(5)  # noqa: S311 # the same lengths for every engine
        self._names = count()
        self._flight: deque[Any] = deque()

    def steps(self, number: int) -> list[float]:
        """Return wall seconds of each of `number` steps."""
        return [self._step() for _ in range(number)]

    def _step(self) -> float:
        fresh = [self._request() for _ in range(self._missing())]
        began_ns = time.perf_counter_ns()
        for request in fresh:
            self.scheduler.add_request(request)
        self._flight.append(self.scheduler.schedule())
        took_ns = time.perf_counter_ns() - began_ns
        if self._ranks is not None:
            self._ranks.send(getattr(self._flight[-1], OPERATIONS, ()))
            self._ranks.recv()
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


class BenchPages(NoPages):
    """Pages of a rank; with `moving` their figure is another one each time."""

    always_restores = False

    def __init__(self, bytes_total: int, *, moving: bool) -> None:
        super().__init__(bytes_total)
        self._figures = count() if moving else repeat(0)

    @property
    def bytes_returned(self) -> int:  # type: ignore[override] # NoPages has a constant
        return next(self._figures)


def reporting_ranks(number: int, *, moving: bool) -> Connection:
    """Have schedulers made from now on lend the memory of these ranks, in a process of their own.

    Return the connection that takes each step's operations, and answers once they were carried out.
    """
    from executor.vllm.host import kv_lender

    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    arguments = number, theirs, ours, moving
    process = fork.Process(target=carry_out, args=arguments, daemon=True)
    process.start()
    theirs.close()
    ours.recv()
    pages = RankPages.of_processes([process.pid or 0], number, BLOCKS)
    kv_lender.kv_pages = lambda *_: (pages, GRANULES)  # type: ignore[attr-defined]
    return ours


def carry_out(number: int, steps: Connection, scheduler: Connection, moving: bool) -> None:
    """Run the ranks on another core than the scheduler's, until it hangs up."""
    scheduler.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.sched_setaffinity(0, {CORES[0]})
    pages = [BenchPages(KV_BYTES, moving=moving) for _ in range(number)]
    pagers = [RankPager(each, GRANULES, rank, number) for rank, each in enumerate(pages)]
    with suppress(EOFError):
        while True:
            steps.send(None)
            operations = steps.recv()
            for pager in pagers:
                pager.carry_out(operations)


def engine_config(folder: Path) -> Any:  # noqa: ANN401 - vLLM's VllmConfig
    """Return vLLM's configuration of a small model, for a host of RUNNING sequences."""
    from vllm.engine.arg_utils import EngineArgs

    model = TinyModel(
        hidden=64, layers=1, heads=2, mlp=64, vocabulary=VOCABULARY, max_positions=1 << 20
    )
    model.config().save_pretrained(folder)
    made = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_num_seqs=RUNNING,
        max_num_batched_tokens=4096,
        block_size=BLOCK_TOKENS,
    ).create_engine_config()
    made.cache_config.num_gpu_blocks = BLOCKS
    # vLLM switches it off on a CPU.
    made.scheduler_config.async_scheduling = True
    return made


def scheduler_of(kind: Callable[..., Any], config: Any) -> Any:  # noqa: ANN401 - vLLM's
    """Return a scheduler with the cache of one layer: its blocks are counted, never touched."""
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
    """Return names for full blocks, as the engine core makes them for prefix caching."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash

    hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_fn)
    return get_request_block_hasher(BLOCK_TOKENS, hash_fn)


def worker(kind: str, ranks: int) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from executor.vllm.host.scheduler import ObservedScheduler

    classes = {
        "stock": AsyncScheduler,
        "observed": ObservedScheduler,
        "timed": timed_scheduler() if kind == "timed" else None,
    }
    # Its page's folder is removed at the end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    # Collections fall between rounds: vLLM freezes its heap for the same reason.
    gc.disable()
    with tempfile.TemporaryDirectory(prefix="rose-host-overhead-", dir=PAGE_FOLDER) as folder:
        config = engine_config(Path(folder))
        # Imported objects stay; the collector need not look through them again.
        gc.freeze()
        # Imports are most of a start, and those of all arms share all cores.
        os.sched_setaffinity(0, {CORES[-1]})
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        name = ""
        engine: VllmSteps | None = None
        for line in sys.stdin:
            if line.strip() != name:
                name, engine = line.strip(), None
                gc.collect()
                engine = loaded(name, kind, classes[kind], config, ranks)
            assert engine is not None
            gc.collect()
            sys.stdout.write(f"{round_of(engine, kind) * 1e6}\n")
            sys.stdout.flush()


def loaded(name: str, kind: str, made: Any, config: Any, ranks: int) -> VllmSteps:  # noqa: ANN401 - vLLM's
    """Return an engine under the load of this name."""
    (traffic,) = [each for each in TRAFFICS if each.name == name]
    page = Path(config.model_config.model) / name
    os.environ["ROSE_CONTROL_PAGE"] = str(page)
    lends = kind != "stock" and ranks > 1
    reports = reporting_ranks(ranks, moving=traffic.moving) if lends else None
    engine = VllmSteps(scheduler_of(made, config), block_hasher(config), traffic, reports)
    engine.steps(FIRST_STEPS)
    # Steps that lend free memory for the first time cost more, and are not measured.
    while lends and engine.scheduler.lender.pending:
        engine.steps(1)
    if kind != "stock":
        check_published(page)
        assert not lends or engine.scheduler.lender.lent.granules_total
    return engine


def check_published(path: Path) -> None:
    """Exit unless the page tells of the load: a host that does not publish costs nothing."""
    with ControlPage.open(path) as page:
        state = page.host_state
    if state is None or state.running + state.waiting < RUNNING:
        raise SystemExit(f"the host section does not tell of {RUNNING} running requests: {state}")


def timed_scheduler() -> Any:  # noqa: ANN401 - a class of vLLM's
    """Return an ObservedScheduler class that adds up the time of ROSE's code.

    A class of its own: a method that is replaced on an instance makes CPython keep that instance's
    attributes in another way, and slows all of its code.
    """
    from executor.vllm.host.scheduler import ObservedScheduler

    class TimedScheduler(ObservedScheduler):
        spent_ns = 0
        lends = False

        def _quietly(self, observe: Callable[..., None], *args: object) -> None:
            if self.lends:
                super()._quietly(observe, *args)
                return
            began_ns = time.perf_counter_ns()
            super()._quietly(observe, *args)
            self.spent_ns += time.perf_counter_ns() - began_ns

        def _lend(self, *, arrived: bool = False) -> None:
            self.lends, began_ns = True, time.perf_counter_ns()
            super()._lend(arrived=arrived)
            self.spent_ns += time.perf_counter_ns() - began_ns
            self.lends = False

    return TimedScheduler


def round_of(engine: VllmSteps, kind: str) -> float:
    """Return median seconds of a round's steps; of a timed engine, of what was added to them."""
    if kind != "timed":
        return median(engine.steps(STEPS_A_ROUND))
    spent: list[float] = []
    for _ in range(STEPS_A_ROUND):
        engine.scheduler.spent_ns = 0
        engine.steps(1)
        spent.append(float(engine.scheduler.spent_ns) / 1e9)
    return median(spent)


@dataclass(slots=True)
class Rounds:
    """Microseconds of one load: a list for each pair of processes, (observed, stock) a round."""

    pairs: list[list[tuple[float, float]]] = field(default_factory=list)
    inside: list[list[tuple[float, float]]] = field(default_factory=list)

    def measure(self, traffic: OverheadTraffic, rounds: int, arms: dict[str, BenchProcess]) -> None:
        """Measure one pair of processes, the two by turns."""
        order = random.Random(len(self.pairs))  # noqa: S311 # an order, not a secret
        pairs, inside = [], []
        for _ in range(rounds):
            took = {}
            for name in order.sample(sorted(arms), len(arms)):
                took[name] = float(arms[name].ask(traffic.name))
            pairs.append((took["observed"], took["stock"]))
            inside.append((took["timed"], 0.0))
        self.pairs.append(pairs)
        self.inside.append(inside)

    def figures(self, traffic: OverheadTraffic) -> dict[str, object]:
        every = [pair for pairs in self.pairs for pair in pairs]
        return {
            "overhead_us": estimate(self.pairs),
            "inside_us": estimate(self.inside),
            "stock_step_us": round(median(stock for _, stock in every), 1),
            "observed_step_us": round(median(observed for observed, _ in every), 1),
            "in_flight": traffic.in_flight,
            "waiting": traffic.backlog,
        }


def estimate(pairs: Sequence[Sequence[tuple[float, float]]]) -> dict[str, object]:
    """Return mean difference of pairs, and its 95% bootstrap interval over pairs of processes."""
    made: Estimate = paired_difference(pairs, seed=3)
    low_high = None if made.ci95 is None else [round(bound, 2) for bound in made.ci95]
    return {"mean": round(made.value, 2), "ci95": low_high}


def within_target(figures: dict[str, object]) -> bool:
    """Return True if the whole interval of the added code's own time is within the target."""
    inside = figures["inside_us"]
    assert isinstance(inside, dict)
    return inside["ci95"] is not None and inside["ci95"][1] <= TARGET_US


def measured(rounds: int, ranks: int) -> dict[str, Rounds]:
    """Measure every load, by pairs of fresh processes, one after the other."""
    traffics = [traffic for traffic in TRAFFICS if ranks > 1 or not traffic.moving]
    found = {traffic.name: Rounds() for traffic in traffics}
    for _ in range(PROCESSES):
        with ExitStack() as stack:
            arms = {
                kind: stack.enter_context(
                    BenchProcess(
                        kind,
                        python(MODULE, "--worker", kind, "--tensor-parallel-size", str(ranks)),
                        piped=True,
                    )
                )
                for kind in KINDS
            }
            for arm in arms.values():
                assert arm.read() == b"ready\n"
            for traffic in traffics:
                found[traffic.name].measure(traffic, rounds, arms)
    return found


def main() -> int:
    parser = parser_of(__doc__, MODULE, rounds=6)
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    arguments = parser.parse_args()
    ranks = arguments.tensor_parallel_size
    os.environ |= ENVIRONMENT | ({"ROSE_HOST_LEVEL": "lend"} if ranks > 1 else {})
    if arguments.worker:
        worker(arguments.worker, ranks)
        return 0
    found = measured(arguments.rounds, ranks)
    loads = {each.name: found[each.name].figures(each) for each in TRAFFICS if each.name in found}
    holds = all(within_target(figures) for figures in loads.values())
    report = {
        "running": RUNNING,
        "ranks": ranks,
        "target_us": TARGET_US,
        "holds": holds,
        "processes": PROCESSES,
        "rounds": arguments.rounds,
        "steps_a_round": STEPS_A_ROUND,
        "loads": loads,
    }
    return put_judged(report, arguments.out, good=holds, shown=arguments.out is None)


if __name__ == "__main__":
    sys.exit(main())
