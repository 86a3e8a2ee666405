"""Output of a host under each state of its page, as JSON. argv: model, page; no page: stock.

In one process, with the plugin attached anew for each state: an engine takes long to start. First
the host is only observed; then it lends: each round is a burst of requests, and between bursts the
host is idle, and lends. ROSE_TEST_RANKS=2 makes an engine over two ranks, which lends from its
start on or never.
"""

import json
import os
import random
import shutil
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from executor import ControlPage, Grant, GrantMode
from executor.control_page.page import LAYOUT_VERSION, PAGE_BYTES

MODEL = sys.argv[1]
PAGE = Path(sys.argv[2]) if len(sys.argv) > 2 else None
VOCABULARY = 96
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
Prompts = list[dict[str, list[int]]]
PROMPTS: Prompts = [
    {"prompt_token_ids": [(7 * k + 11 * n) % VOCABULARY for k in range(30 + n)]} for n in range(6)
]
# Small enough that the largest bursts need all of it.
KV_BYTES = 24 << 20
RANKS = int(os.environ.get("ROSE_TEST_RANKS", "1"))
ROUNDS = 6


def build() -> LLM:
    return LLM(
        model=MODEL,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        kv_cache_memory_bytes=KV_BYTES // RANKS,
        max_model_len=512,
        block_size=32,
        enable_prefix_caching=False,
        **(over_ranks() if RANKS > 1 else {"distributed_executor_backend": UNIPROC}),
    )


def over_ranks() -> dict[str, Any]:
    worker = {"worker_cls": "executor.vllm.cpu_worker.CpuKvWorker"} if PAGE else {}
    return {"distributed_executor_backend": "mp", "tensor_parallel_size": RANKS, **worker}


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def bursts() -> list[Prompts]:
    """Small ones that the reserve serves, and large ones that need all of the pool."""
    rng = random.Random(3)
    return [
        [
            {"prompt_token_ids": [rng.randrange(VOCABULARY) for _ in range(rng.randint(20, 380))]}
            for _ in range(2 if number % 2 else 40)
        ]
        for number in range(ROUNDS)
    ]


class ExactEngine:
    def __init__(self) -> None:
        self._llm = build()
        self._core = self._llm.llm_engine.engine_core.engine_core
        self.lent: list[int] = []
        self.returned: list[int] = []

    @property
    def scheduler(self) -> Any:
        return self._core.scheduler

    def tokens(self) -> list[list[int]]:
        outputs = self._llm.generate(PROMPTS, greedy(48), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def answers(self) -> list[list[list[int]]]:
        return [self._burst(prompts) for prompts in bursts()]

    def _burst(self, prompts: Prompts) -> list[list[int]]:
        self._idle()
        self._note()
        engine = self._llm.llm_engine
        for number, prompt in enumerate(prompts):
            engine.add_request(f"r{number}", prompt, greedy(90))
        found: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            done = engine.step()
            self._note()
            found |= {
                out.request_id: list(out.outputs[0].token_ids) for out in done if out.finished
            }
        return [found[f"r{number}"] for number in range(len(prompts))]

    def _idle(self) -> None:
        """Run the core's idle loop."""
        while self.scheduler.has_requests():
            self._core.step()
            self._note()

    def _note(self) -> None:
        lender = getattr(self.scheduler, "lender", None)
        if lender is not None:
            self.lent.append(lender.lent.granules_lent)
            self.returned.append(lender.lent.bytes_lent)

    def shutdown(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def fresh(page: Path) -> None:
    page.unlink(missing_ok=True)
    page.parent.mkdir(exist_ok=True)
    ControlPage.create(page).close()


def patched(offset: int, raw: bytes) -> Callable[[Path], None]:
    def prepare(page: Path) -> None:
        fresh(page)
        with page.open("r+b") as file:
            file.seek(offset)
            file.write(raw)

    return prepare


def stale(page: Path) -> None:
    fresh(page)
    with ControlPage.open(page) as mapped:
        mapped.grant.write(Grant(GrantMode.RUN, 512, 16, heartbeat_ns=1, expiry_ns=2))


def no_folder(page: Path) -> None:
    # The page, and the host's description beside it.
    shutil.rmtree(page.parent)


def open_to_others(page: Path) -> None:
    fresh(page)
    page.chmod(0o644)


def cut_short(page: Path) -> None:
    fresh(page)
    os.truncate(page, PAGE_BYTES // 2)


not_a_page = patched(0, b"\xff" * 64)
OBSERVED: dict[str, Callable[[Path], None]] = {
    "whole": fresh,
    "stale": stale,
    "other layout": patched(8, struct.pack("=I", LAYOUT_VERSION + 1)),
    "not a page": not_a_page,
    "before the last boot": patched(32, bytes(16)),
    "open to others": open_to_others,
    "cut short": cut_short,
    "missing": no_folder,
}
LENDS: dict[str, Callable[[Path], None]] = {
    "whole": fresh,
    "not a page": not_a_page,
    "missing": no_folder,
}


def scribble(page: Path, ended: threading.Event) -> None:
    chance = random.Random(1)
    with page.open("r+b") as file:
        while not ended.is_set():
            file.seek(chance.randrange(64, 4096))
            file.write(chance.randbytes(64))
            file.flush()
            time.sleep(0.0005)


def under_scribbles(engine: ExactEngine, page: Path) -> list[list[int]]:
    ended = threading.Event()
    vandal = threading.Thread(target=scribble, args=(page, ended))
    vandal.start()
    try:
        return engine.tokens()
    finally:
        ended.set()
        vandal.join()


def deleted_meanwhile(engine: ExactEngine, page: Path) -> list[list[int]]:
    page.unlink()
    return engine.tokens()


def observed(engine: ExactEngine, page: Path) -> dict[str, Any]:
    def attach() -> bool:
        engine.scheduler.attach()
        return engine.scheduler.observer is not None

    found: dict[str, Any] = {}
    for name, prepare in OBSERVED.items():
        prepare(page)
        found[name] = {"published": attach(), "tokens": engine.tokens()}
    during = {"scribbled over": under_scribbles, "deleted meanwhile": deleted_meanwhile}
    for name, run in during.items():
        fresh(page)
        found[name] = {"published": attach(), "tokens": run(engine, page)}
    return found


def lending(engine: ExactEngine, page: Path) -> dict[str, Any]:
    os.environ["ROSE_HOST_LEVEL"] = "lend"
    found: dict[str, Any] = {}
    for name, prepare in LENDS.items():
        prepare(page)
        engine.lent.clear()
        engine.scheduler.give_up()
        engine.scheduler.attach()
        found[name] = lent_meanwhile(engine)
    return found


def lent_meanwhile(engine: ExactEngine) -> dict[str, Any]:
    lends = engine.scheduler.lender is not None
    found = {"lends": lends, "answers": engine.answers(), "lent": engine.lent[:]}
    queue = engine.scheduler.kv_cache_manager.block_pool.free_block_queue
    found |= {"queue": type(queue).__name__, "returned": max(engine.returned, default=0)}
    lender = engine.scheduler.lender
    return found | {"granule_bytes": lender.pool.granule_bytes if lender is not None else 0}


def stock(engine: ExactEngine) -> dict[str, Any]:
    return {"tokens": engine.tokens(), "answers": engine.answers()}


def main() -> None:
    if PAGE:
        PAGE.parent.mkdir(exist_ok=True)
    engine = ExactEngine()
    if PAGE is None:
        found = stock(engine)
    elif RANKS > 1:
        found = {"tokens": engine.tokens(), **lent_meanwhile(engine)}
    else:
        found = {"observed": observed(engine, PAGE), "lending": lending(engine, PAGE)}
    # vLLM writes to standard output as well.
    sys.stdout.write("\nRESULT " + json.dumps(found) + "\n")
    sys.stdout.flush()
    engine.shutdown()


if __name__ == "__main__":
    main()
