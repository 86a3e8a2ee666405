"""What a host generates under each state of its page, as JSON. argv: model, page; no page: stock.

In one process, with the plugin attached anew for each state: an engine takes long to start.
"""

import json
import os
import random
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from executor import ControlPage, Grant, GrantMode
from executor.control_page import LAYOUT_VERSION, PAGE_BYTES

MODEL = sys.argv[1]
PAGE = Path(sys.argv[2]) if len(sys.argv) > 2 else None
PROMPTS = [{"prompt_token_ids": [(7 * k + 11 * n) % 96 for k in range(30 + n)]} for n in range(6)]


def build() -> LLM:
    return LLM(
        model=MODEL,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        kv_cache_memory_bytes=67108864,
        max_model_len=512,
        enable_prefix_caching=False,
        distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
        **({"scheduler_cls": "executor.vllm.host.ObservedScheduler"} if PAGE else {}),
    )


def tokens(llm: LLM) -> list[list[int]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True, detokenize=False)
    return [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, sampling, use_tqdm=False)]


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
    page.unlink(missing_ok=True)
    page.parent.rmdir()


def open_to_others(page: Path) -> None:
    fresh(page)
    page.chmod(0o644)


def cut_short(page: Path) -> None:
    fresh(page)
    os.truncate(page, PAGE_BYTES // 2)


BEFORE: dict[str, Callable[[Path], None]] = {
    "whole": fresh,
    "stale": stale,
    "other layout": patched(8, struct.pack("=I", LAYOUT_VERSION + 1)),
    "not a page": patched(0, b"\xff" * 64),
    "before the last boot": patched(16, struct.pack("=Q", 2**62)),
    "open to others": open_to_others,
    "cut short": cut_short,
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


def under_scribbles(llm: LLM, page: Path) -> list[list[int]]:
    ended = threading.Event()
    vandal = threading.Thread(target=scribble, args=(page, ended))
    vandal.start()
    try:
        return tokens(llm)
    finally:
        ended.set()
        vandal.join()


def deleted_meanwhile(llm: LLM, page: Path) -> list[list[int]]:
    page.unlink()
    return tokens(llm)


def attach(scheduler: Any) -> bool:
    scheduler._observer = None
    scheduler._quietly(scheduler._attach)
    return scheduler._observer is not None


def observed(llm: LLM, page: Path) -> dict[str, Any]:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    found: dict[str, Any] = {}
    for name, prepare in BEFORE.items():
        prepare(page)
        found[name] = {"published": attach(scheduler), "tokens": tokens(llm)}
    during = {"scribbled over": under_scribbles, "deleted meanwhile": deleted_meanwhile}
    for name, run in during.items():
        fresh(page)
        found[name] = {"published": attach(scheduler), "tokens": run(llm, page)}
    return found


def main() -> None:
    if PAGE:
        PAGE.parent.mkdir(exist_ok=True)
    llm = build()
    found = observed(llm, PAGE) if PAGE else {"stock": {"published": False, "tokens": tokens(llm)}}
    # vLLM writes to standard output as well.
    sys.stdout.write("\nRESULT " + json.dumps(found) + "\n")
    sys.stdout.flush()
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
