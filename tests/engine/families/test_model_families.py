"""Every model family's KV memory is lent and given back, and its updates are proven, as
docs/models.md says: works, or the line that refuses."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.generated import ROOT
from scripts.models_table import RUN, WORKS, kv_cells, results, weights_cell
from tests.engine.families.family_kv import DRAFT
from tests.engine.families.tiny_families import (
    AT_LOAD,
    FAMILIES,
    MATRIX_EXTENSION,
    ON_SGLANG,
)
from tests.engine.sglang_python import MISSING, PYTHON

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1800)]

LONE = [family for family in FAMILIES if family != "llama-draft"]
ALL = [*LONE, "qwen3-moe@2", "deepseek-v3@2", *AT_LOAD]
"""Families, two of them on two ranks of tensor parallelism, and those quantised at load."""


Tried = dict[str, dict[str, Any]]


def run(
    program: str,
    families: Sequence[str],
    folder: Path,
    python: str = sys.executable,
    results: str = "*.json",
) -> Tried:
    words = [python, "-m", f"tests.engine.families.{program}", str(folder), *families]
    subprocess.run(words, check=True, capture_output=True, timeout=90 * len(families), cwd=ROOT)
    return taken(folder, results)


def taken(folder: Path, results: str) -> Tried:
    """Return outcomes by family, and keep them for `scripts/models-table --take`."""
    found = {path: json.loads(path.read_text()) for path in folder.glob(results)}
    RUN.mkdir(parents=True, exist_ok=True)
    for path in found:
        shutil.copy(path, RUN)
    return {outcome["family"]: outcome for outcome in found.values()}


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Tried:
    return run("family_updates", ALL, tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def kv_tried(tmp_path_factory: pytest.TempPathFactory) -> Tried:
    return run("family_kv", [*LONE, DRAFT], tmp_path_factory.mktemp("kv"))


@pytest.fixture(scope="module")
def tried_on_sglang(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tried, Tried]:
    """Return the outcomes of weights, and those of KV memory."""
    folder = tmp_path_factory.mktemp("sglang")
    weights = run("sglang_families", ON_SGLANG, folder, PYTHON, "*.sglang.json")
    return weights, taken(folder, "*.sglang.kv.json")


def missing_here(family: str) -> bool:
    """True if vLLM has no kernel for a family on this CPU."""
    import torch

    return family in MATRIX_EXTENSION and not torch.cpu._is_amx_tile_supported()


def insist(outcome: dict[str, Any]) -> None:
    assert outcome["started"]
    assert weights_cell(outcome) == results()[outcome["engine"]][outcome["family"]]["weights"]


def insist_kv(outcome: dict[str, Any]) -> None:
    known, cells = results()[outcome["engine"]][outcome["family"]], kv_cells(outcome)
    assert cells == {part: known[part] for part in cells}
    for part in ("guest", "host"):
        if cells[part] == WORKS:
            assert outcome[f"{part}_bytes"] > outcome["kv_bytes"] // 2, outcome


@pytest.mark.parametrize("family", ALL)
def test_a_family_is_proven_or_refused(family: str, tried: Tried) -> None:
    if missing_here(family):
        pytest.skip("its kernels take a CPU with AMX")
    insist(tried[family])


@pytest.mark.parametrize("family", [*LONE, DRAFT])
def test_a_familys_kv_memory_is_lent_and_given_back(family: str, kv_tried: Tried) -> None:
    if missing_here(family):
        pytest.skip("its kernels take a CPU with AMX")
    insist_kv(kv_tried[family])


@pytest.mark.skipif(not PYTHON, reason=MISSING)
@pytest.mark.parametrize("family", ON_SGLANG)
def test_a_family_on_sglang_is_proven_and_lends_or_is_refused(
    family: str, tried_on_sglang: tuple[Tried, Tried]
) -> None:
    weights, kv = tried_on_sglang
    insist(weights[family])
    insist_kv(kv[family])
