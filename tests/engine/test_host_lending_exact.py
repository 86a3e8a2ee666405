"""A host that lends generates what stock vLLM does, token for token in fp32, whatever its page."""

import json
import logging
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from test_host_exact import ENVIRONMENT
from tiny_model import save_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

log = logging.getLogger(__name__)


def run(model: Path, page: Path, level: str) -> tuple[dict[str, Any], str]:
    script = Path(__file__).with_name("lending_host.py")
    rose = {"ROSE_ROLE": "host", "ROSE_CONTROL_PAGE": str(page), "ROSE_HOST_LEVEL": level}
    done = subprocess.run(
        [sys.executable, str(script), str(model), str(page), level],
        env={**os.environ, **ENVIRONMENT, **(rose if level == "lend" else {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )
    logged, told, result = done.stdout.partition("\nRESULT ")
    said = logged + done.stderr
    assert told, said[-4000:]
    found: dict[str, Any] = json.loads(result.splitlines()[0])
    return found, said


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[list[list[int]]], dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("lending")
    save_tiny_model(folder / "model", dtype="float32")
    stock, _ = run(folder / "model", folder / "shared" / "page", "stock")
    lending, said = run(folder / "model", folder / "shared" / "page", "lend")
    return stock["stock"]["tokens"], lending, said


@pytest.mark.parametrize("page", ["whole", "not a page", "missing"])
def test_the_host_generates_what_stock_vllm_does(
    runs: tuple[list[list[list[int]]], dict[str, Any], str], page: str
) -> None:
    stock, lending, _ = runs
    answers = [answer for burst in stock for answer in burst]
    assert len(answers) > 100
    assert all(len(answer) == 90 for answer in answers)
    assert lending[page]["tokens"] == stock


def test_memory_went_out_and_came_back_under_it_all(
    runs: tuple[list[list[list[int]]], dict[str, Any], str],
) -> None:
    whole = runs[1]["whole"]
    moves = [after - before for before, after in pairwise(whole["lent"])]
    lent, back = sum(move > 0 for move in moves), sum(move < 0 for move in moves)
    log.info("most lent: %d granules; lent %d times, back %d times", max(whole["lent"]), lent, back)
    assert whole["lends"]
    assert min(lent, back) >= 3
    assert 0 in whole["lent"], "the largest bursts needed all of it"


@pytest.mark.parametrize("page", ["not a page", "missing"])
def test_without_a_good_page_the_host_is_the_stock_one(
    runs: tuple[list[list[list[int]]], dict[str, Any], str], page: str
) -> None:
    found = runs[1][page]
    assert not found["lends"]
    assert found["lent"] == []
    assert found["queue"] == "FreeKVCacheBlockQueue"


def test_each_bad_page_is_said_once(
    runs: tuple[list[list[list[int]]], dict[str, Any], str],
) -> None:
    assert runs[2].count("is not a control page") == 1
    assert runs[2].count("the host is no longer published") == 2
