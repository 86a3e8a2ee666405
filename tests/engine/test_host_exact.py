"""A host under ROSE generates what stock vLLM does, token for token in fp32, page or no page."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_model import save_tiny_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "none",
}
GOOD = {"whole", "stale", "scribbled over", "deleted meanwhile"}
BAD = {
    "other layout",
    "not a page",
    "before the last boot",
    "open to others",
    "cut short",
    "missing",
}


def run(model: Path, *page: Path) -> tuple[dict[str, Any], str]:
    script = Path(__file__).with_name("exact_host.py")
    rose = {"ROSE_ROLE": "host", "ROSE_CONTROL_PAGE": str(page[0])} if page else {}
    rose |= {"ROSE_SLO_TTFT_S": "0.5", "ROSE_SLO_TPOT_S": "0.15"} if page else {}
    done = subprocess.run(
        [sys.executable, str(script), str(model), *map(str, page)],
        env={**os.environ, **ENVIRONMENT, **rose},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    logged, told, result = done.stdout.partition("\nRESULT ")
    said = logged + done.stderr
    assert told, said[-4000:]
    found: dict[str, Any] = json.loads(result.splitlines()[0])
    return found, said


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[list[int]], dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("exact")
    save_tiny_model(folder / "model", dtype="float32")
    stock, _ = run(folder / "model")
    observed, said = run(folder / "model", folder / "shared" / "page")
    return stock["stock"]["tokens"], observed, said


@pytest.mark.parametrize("page", sorted(GOOD | BAD))
def test_the_host_generates_what_stock_vllm_does(
    runs: tuple[list[list[int]], dict[str, Any], str], page: str
) -> None:
    stock, observed, _ = runs
    assert len(stock) == 6
    assert all(len(tokens) == 48 for tokens in stock)
    assert observed[page]["tokens"] == stock
    assert observed[page]["published"] == (page in GOOD)


def test_each_bad_page_is_said_once(
    runs: tuple[list[list[int]], dict[str, Any], str],
) -> None:
    said = runs[2]
    for words in ("has layout", "is not a control page", "before the last boot", "chmod 600"):
        assert said.count(words) == 1
