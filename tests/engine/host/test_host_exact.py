"""A host under ROSE generates what stock vLLM does, token for token in fp32, whatever its page.

Observed only, and while it lends memory. Two engines, one without ROSE, each within a process.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engine_starts import EngineStarts
from tiny_model import save_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

log = logging.getLogger(__name__)
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "rose_host",
}
ROSE = {"ROSE_ROLE": "host", "ROSE_SLO_TTFT_S": "0.5", "ROSE_SLO_TPOT_S": "0.15"}
GOOD = {"whole", "stale", "scribbled over", "deleted meanwhile"}
BAD = {
    "other layout",
    "not a page",
    "before the last boot",
    "open to others",
    "cut short",
    "missing",
}


@dataclass
class ReportedRuns:
    """Generated tokens, and the reports of the host with ROSE meanwhile."""

    stock: dict[str, Any]
    observed: dict[str, Any]
    lending: dict[str, Any]
    said: str


def start(
    model: Path, *page: Path, rose: Mapping[str, str] = ROSE, **more: str
) -> "subprocess.Popen[str]":
    script = Path(__file__).with_name("exact_host.py")
    told = {**rose, "ROSE_CONTROL_PAGE": str(page[0])} if page else {}
    return subprocess.Popen(
        [sys.executable, str(script), str(model), *map(str, page)],
        env={**os.environ, **ENVIRONMENT, **more, **told},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def result(process: "subprocess.Popen[str]", most_s: float = 800) -> tuple[dict[str, Any], str]:
    said, told, result = process.communicate(timeout=most_s)[0].partition("\nRESULT ")
    assert told, said[-4000:]
    found: dict[str, Any] = json.loads(result.splitlines()[0])
    return found, said


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, engine_starts: EngineStarts) -> ReportedRuns:
    folder = tmp_path_factory.mktemp("exact")
    save_tiny_model(folder / "model", dtype="float32")
    for _ in range(2):
        engine_starts.note()
    with (
        start(folder / "model") as without,
        start(folder / "model", folder / "shared" / "page") as host,
    ):
        try:
            stock, _ = result(without)
            found, said = result(host)
        finally:
            without.kill()
            host.kill()
    return ReportedRuns(stock, found["observed"], found["lending"], said)


@pytest.mark.parametrize("page", sorted(GOOD | BAD))
def test_an_observed_host_generates_what_stock_vllm_does(runs: ReportedRuns, page: str) -> None:
    stock = runs.stock["tokens"]
    assert len(stock) == 6
    assert all(len(tokens) == 48 for tokens in stock)
    assert runs.observed[page]["tokens"] == stock
    assert runs.observed[page]["published"] == (page in GOOD)


@pytest.mark.parametrize("page", ["whole", "not a page", "missing"])
def test_a_host_that_is_to_lend_generates_what_stock_vllm_does(
    runs: ReportedRuns, page: str
) -> None:
    stock = runs.stock["answers"]
    answers = [answer for burst in stock for answer in burst]
    assert len(answers) > 100
    assert all(len(answer) == 90 for answer in answers)
    assert runs.lending[page]["answers"] == stock


def test_memory_went_out_and_came_back_under_it_all(runs: ReportedRuns) -> None:
    whole = runs.lending["whole"]
    moves = [after - before for before, after in pairwise(whole["lent"])]
    lent, back = sum(move > 0 for move in moves), sum(move < 0 for move in moves)
    log.info("most lent: %d granules; lent %d times, back %d times", max(whole["lent"]), lent, back)
    assert whole["lends"]
    assert min(lent, back) >= 3
    assert 0 in whole["lent"], "the largest bursts needed all of it"


@pytest.mark.parametrize("page", ["not a page", "missing"])
def test_without_a_good_page_the_host_is_the_stock_one(runs: ReportedRuns, page: str) -> None:
    found = runs.lending[page]
    assert not found["lends"]
    assert found["lent"] == []
    assert found["queue"] == "FreeKVCacheBlockQueue"


def test_each_bad_page_is_said_once(runs: ReportedRuns) -> None:
    for words in ("has layout", "before the last boot", "chmod 600"):
        assert runs.said.count(words) == 1
    # Once while it was observed, once as it was to lend.
    assert runs.said.count("is not a control page") == 2
    assert runs.said.count("the host is no longer published") == len(BAD) + 2
