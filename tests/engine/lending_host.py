"""What a host generates while it lends, as JSON. argv: model, page, then "stock" or "lend".

In one process, with the plugin attached anew for each state of the page: an engine takes long to
start. Each round is a burst of requests; between bursts the host is idle, and lends.
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from executor import ControlPage
from executor.vllm.host import ObservedScheduler

MODEL, PAGE, LEVEL = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
KV_BYTES = 24 << 20
ROUNDS = 6
VOCABULARY = 96


def build() -> LLM:
    lend = {"scheduler_cls": "executor.vllm.host.ObservedScheduler"} if LEVEL == "lend" else {}
    return LLM(
        model=MODEL,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        kv_cache_memory_bytes=KV_BYTES,
        max_model_len=512,
        block_size=32,
        enable_prefix_caching=False,
        distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
        **lend,
    )


def bursts() -> list[list[dict[str, list[int]]]]:
    """Small ones that the reserve serves, and large ones that need all of the pool."""
    rng = random.Random(3)
    return [
        [
            {"prompt_token_ids": [rng.randrange(VOCABULARY) for _ in range(rng.randint(20, 380))]}
            for _ in range(2 if number % 2 else 40)
        ]
        for number in range(ROUNDS)
    ]


class Engine:
    def __init__(self) -> None:
        self._llm = build()
        self._core = self._llm.llm_engine.engine_core.engine_core
        self.lent: list[int] = []
        self.preempted = 0

    @property
    def scheduler(self) -> Any:
        return self._core.scheduler

    def idle(self) -> None:
        """What the core's loop does while no request comes."""
        while self.scheduler.has_requests():
            self._core.step()
            self._note()

    def answers(self) -> list[list[list[int]]]:
        return [self._burst(prompts) for prompts in bursts()]

    def _burst(self, prompts: list[dict[str, list[int]]]) -> list[list[int]]:
        self.idle()
        self._note()
        engine = self._llm.llm_engine
        sampling = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True, detokenize=False)
        for number, prompt in enumerate(prompts):
            engine.add_request(f"r{number}", prompt, sampling)
        found: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            done = engine.step()
            self._note()
            found |= {
                out.request_id: list(out.outputs[0].token_ids) for out in done if out.finished
            }
        return [found[f"r{number}"] for number in range(len(prompts))]

    def _note(self) -> None:
        lender = getattr(self.scheduler, "_lender", None)
        if lender is not None:
            self.lent.append(lender.lent.granules_lent)


def whole(page: Path) -> None:
    page.unlink(missing_ok=True)
    page.parent.mkdir(exist_ok=True)
    ControlPage.create(page).close()


def not_a_page(page: Path) -> None:
    whole(page)
    with page.open("r+b") as file:
        file.write(b"\xff" * 64)


def missing(page: Path) -> None:
    page.unlink(missing_ok=True)
    page.parent.rmdir()


BEFORE: dict[str, Callable[[Path], None]] = {
    "whole": whole,
    "not a page": not_a_page,
    "missing": missing,
}


def attach(scheduler: ObservedScheduler) -> bool:
    scheduler._give_up()
    scheduler._quietly(scheduler._attach)
    return scheduler._lender is not None


def lending(engine: Engine) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, prepare in BEFORE.items():
        prepare(PAGE)
        engine.lent.clear()
        lends = attach(engine.scheduler)
        found[name] = {"lends": lends, "tokens": engine.answers(), "lent": engine.lent[:]}
        found[name]["queue"] = type(
            engine.scheduler.kv_cache_manager.block_pool.free_block_queue
        ).__name__
    return found


def main() -> None:
    PAGE.parent.mkdir(exist_ok=True)
    engine = Engine()
    found = lending(engine) if LEVEL == "lend" else {"stock": {"tokens": engine.answers()}}
    # vLLM writes to standard output as well.
    sys.stdout.write("\nRESULT " + json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
