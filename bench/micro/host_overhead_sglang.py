"""Cost of publishing to a host's scheduler, for SGLang; run it by an interpreter that has it.

    .venv-sglang/bin/python -m bench.micro.host_overhead_sglang [--out FILE]

Real requests go through SGLang's real scheduler, RUNNING at a time, and its loop's turns are taken
by hand; only the model is missing: every request is answered with the same token. `inside_us` is
what ROSE's hooks take of a step by their own clock, arrivals included, and is held against the
target; the stock engine's step is beside it. Two loads: one whose requests never end, and one in
which each that ends makes room for the next, so that most steps are prefills. Prints one JSON
object; exit code 1 when a median is above the target.
"""

import gc
import os
import random
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench.common.report import parser_of, put_judged
from bench.common.tiny_models import TinyModel
from executor import ControlPage
from executor.control_page.page import PAGE_FOLDER
from executor.sglang.host.plugin import HostHooks, SglangHost

TARGET_US = 30.0
RUNNING = 256
PROMPT_TOKENS = 16
VOCABULARY = 1_000
FIRST_STEPS = 20
LOADS = {"steady": (100_000, 100_000), "turnover": (50, 350)}
"""By name, the shortest and the longest answer."""
ENVIRONMENT = {
    "ROSE_ROLE": "host",
    "ROSE_SLO_TTFT_S": "0.5",
    "ROSE_SLO_TPOT_S": "0.15",
    "SGLANG_PLUGINS": "none",
    "HF_HUB_OFFLINE": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


class TimedHooks:
    """ROSE's hooks around the scheduler's calls, with the time that they take beside SGLang's."""

    def __init__(self, scheduler: Any) -> None:  # noqa: ANN401 -- SGLang's
        self.spent_ns = 0
        self._inside_ns = 0
        self._originals: dict[str, Callable[..., Any]] = {}
        self._scheduler = scheduler
        hooks = HostHooks(lends=False)
        hooks._host = SglangHost(scheduler)
        hooks._host.attach()
        self.host = hooks._host
        self._hooks = {name.rpartition(".")[2]: hook for name, hook in hooks.hooks.items()}

    def call(self, name: str, *args: Any, **named: Any) -> Any:  # noqa: ANN401 -- SGLang's
        """Call the scheduler's method through its hook."""
        original = self._originals.get(name)
        if original is None:
            original = self._originals[name] = self._clocked(getattr(type(self._scheduler), name))
        self._inside_ns = 0
        began_ns = time.perf_counter_ns()
        found = self._hooks[name](original, self._scheduler, *args, **named)
        self.spent_ns += time.perf_counter_ns() - began_ns - self._inside_ns
        return found

    def _clocked(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*args: Any, **named: Any) -> Any:  # noqa: ANN401 -- SGLang's
            began_ns = time.perf_counter_ns()
            try:
                return original(*args, **named)
            finally:
                self._inside_ns += time.perf_counter_ns() - began_ns

        return clocked


class SglangSteps:
    """One scheduler and its load, a turn of the loop at a time."""

    def __init__(self, scheduler: Any) -> None:  # noqa: ANN401 -- SGLang's
        self.scheduler = scheduler
        self._rng = random.Random(5)  # noqa: S311 -- the same lengths for every run
        self._names = count()
        self._answers = 1, 1
        self.timed = TimedHooks(scheduler)

    def load(self, answers: tuple[int, int]) -> None:
        """End what runs, and have answers of these lengths from now on."""
        from sglang.srt.managers.io_struct import AbortReq

        self._answers = 0, 0
        self.scheduler.abort_request(AbortReq(abort_all=True))
        while not self.scheduler.is_fully_idle():
            self._turn()
        self._turn()
        self._answers = answers

    def steps(self, number: int) -> tuple[list[float], list[float]]:
        """Return microseconds of the hooks, and of whole turns."""
        inside, whole = [], []
        for _ in range(number):
            self.timed.spent_ns = 0
            began_ns = time.perf_counter_ns()
            self._turn()
            whole.append((time.perf_counter_ns() - began_ns) / 1e3)
            inside.append(self.timed.spent_ns / 1e3)
        return inside, whole

    def _turn(self) -> None:
        scheduler, call = self.scheduler, self.timed.call
        for _ in range(self._missing()):
            call("_add_request_to_queue", self._request())
        plan = call(
            "get_next_batch_to_run",
            running_batch=scheduler.running_batch,
            last_batch=scheduler.last_batch,
        )
        scheduler.running_batch = plan.running_batch
        batch = plan.batch_to_run
        if batch:
            result = call("run_batch", batch)
            call("process_batch_result", batch, result)
        else:
            call("on_idle")
        scheduler.last_batch = batch

    def _missing(self) -> int:
        if not self._answers[1]:
            return 0
        scheduler = self.scheduler
        running = {id(r) for r in scheduler.running_batch.reqs if r.finished_reason is None}
        if scheduler.last_batch:
            running |= {id(r) for r in scheduler.last_batch.reqs if r.finished_reason is None}
        return max(0, RUNNING - len(running) - len(scheduler.waiting_queue))

    def _request(self) -> Any:  # noqa: ANN401 -- SGLang's Req
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(
            max_new_tokens=self._rng.randint(*self._answers), temperature=0.0, ignore_eos=True
        )
        sampling.normalize(None)
        tokens = array("q", [self._rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)])
        return Req(f"r{next(self._names)}", "", tokens, sampling, vocab_size=VOCABULARY)


def scheduler_of(folder: Path) -> Any:  # noqa: ANN401 -- SGLang's
    """Return a scheduler of a tiny random model, whose sockets have no other ends."""
    import zmq
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    model = TinyModel(
        hidden=64, layers=1, heads=2, mlp=64, vocabulary=VOCABULARY, max_positions=1 << 20
    )
    model.config().save_pretrained(folder)
    arguments = ServerArgs(
        model_path=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        device="cpu",
        dtype="bfloat16",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        disable_overlap_schedule=True,
        mem_fraction_static=0.1,
        max_total_tokens=1 << 18,
        max_running_requests=RUNNING,
        context_length=1 << 18,
    )
    ports = PortArgs.init_new(arguments)
    context: Any = zmq.Context.instance()
    for name in (ports.tokenizer_ipc_name, ports.detokenizer_ipc_name):
        context.socket(zmq.PULL).bind(name)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    scheduler = Scheduler(arguments, ports)
    scheduler.model_worker.forward_batch_generation = answered
    return scheduler


def answered(batch: Any, **_: object) -> Any:  # noqa: ANN401 -- SGLang's
    """Return a result in which every request samples token 7."""
    import torch
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.utils import GenerationBatchResult

    return GenerationBatchResult(
        logits_output=LogitsProcessorOutput(next_token_logits=None),
        next_token_ids=torch.full((len(batch.reqs),), 7),
    )


def check_published(path: str) -> None:
    """Exit unless the page tells of the load: a host that does not publish costs nothing."""
    with ControlPage.open(path) as page:
        state = page.host_state
    if state is None or not RUNNING * 0.9 <= state.running + state.waiting <= RUNNING * 1.1:
        raise SystemExit(f"the host section does not tell of {RUNNING} requests: {state}")


def figures(inside: list[float], whole: list[float]) -> dict[str, float]:
    return {
        "inside_us": round(median(inside), 2),
        "inside_p95_us": round(quantiles(inside, n=20)[-1], 2),
        "step_us": round(median(whole), 1),
    }


def main() -> int:
    parser = parser_of(__doc__, "bench.micro.host_overhead_sglang", steps=200)
    arguments = parser.parse_args()
    os.environ |= ENVIRONMENT
    loads = {}
    # In memory, as a page is on a node: on a disk a write waits for its writeback now and then.
    with tempfile.TemporaryDirectory(prefix="rose-host-overhead-", dir=PAGE_FOLDER) as name:
        os.environ["ROSE_CONTROL_PAGE"] = page = str(Path(name) / "page")
        engine = SglangSteps(scheduler_of(Path(name) / "model"))
        gc.disable()
        for load, answers in LOADS.items():
            engine.load(answers)
            engine.steps(FIRST_STEPS)
            check_published(page)
            gc.collect()
            loads[load] = figures(*engine.steps(arguments.steps))
        engine.timed.host.leave()
    holds = all(found["inside_us"] <= TARGET_US for found in loads.values())
    report = {
        "engine": "sglang",
        "running": RUNNING,
        "target_us": TARGET_US,
        "holds": holds,
        "steps": arguments.steps,
        "loads": loads,
    }
    return put_judged(report, arguments.out, good=holds, shown=arguments.out is None)


if __name__ == "__main__":
    sys.exit(main())
