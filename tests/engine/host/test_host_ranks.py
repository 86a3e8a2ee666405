"""A real host over two ranks that lends KV memory of both, and generates what stock vLLM does."""

import logging
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from engine_starts import EngineStarts
from test_host_exact import ROSE, result, start
from tiny_model import save_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

log = logging.getLogger(__name__)
RANKS = {"ROSE_TEST_RANKS": "2"}
LEND = ROSE | {"ROSE_HOST_LEVEL": "lend"}


@dataclass
class Runs:
    """Results of the stock engine and of the host that lends."""

    stock: dict[str, Any]
    host: dict[str, Any]
    said: str


def run(model: Path, *page: Path) -> tuple[dict[str, Any], str]:
    with start(model, *page, rose=LEND, **RANKS) as process:
        try:
            return result(process, 400)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, engine_starts: EngineStarts) -> Runs:
    folder = tmp_path_factory.mktemp("ranks")
    save_tiny_model(folder / "model", dtype="float32")
    for _ in range(2):
        engine_starts.note()
    stock, _ = run(folder / "model")
    return Runs(stock, *run(folder / "model", folder / "shared" / "page"))


def test_a_host_of_two_ranks_generates_what_stock_vllm_does(runs: Runs) -> None:
    assert runs.host["tokens"] == runs.stock["tokens"]
    assert runs.host["answers"] == runs.stock["answers"]
    assert sum(map(len, runs.stock["answers"])) > 100


def test_memory_of_both_ranks_went_out_and_came_back(runs: Runs) -> None:
    lent = runs.host["lent"]
    moves = [after - before for before, after in pairwise(lent)]
    gone, back = sum(move > 0 for move in moves), sum(move < 0 for move in moves)
    log.info(
        "most lent: %d granules, %d KiB of each rank; lent %d times, back %d times",
        max(lent),
        runs.host["returned"] >> 10,
        gone,
        back,
    )
    assert runs.host["lends"], runs.said[-4000:]
    assert min(gone, back) >= 3
    assert 0 in lent, "the largest bursts needed all of it"
    assert runs.host["returned"] > 0.9 * max(lent) * runs.host["granule_bytes"]
