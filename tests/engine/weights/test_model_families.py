"""Updates of every model family are proven, seen where they are stale, or refused at the start."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.tiny_families import FAMILIES
from tests.engine.weights.family_updates import Outcome

pytestmark = pytest.mark.engine

MECHANISMS = {
    "qwen3-moe": "experts",
    "deepseek-v3": "latent attention, shared experts",
    "gpt-oss": "attention sinks",
    "qwen3-next": "linear attention",
    "falcon-h1": "Mamba-2 beside attention",
    "reward": "classifier",
    "int8-channel": "packed weights",
}
"""One family of each mechanism, updated by `make test`; `make nightly` updates all."""

ALL = [*FAMILIES, "qwen3-moe@2", "deepseek-v3@2"]
"""Families, and two of them on two ranks of tensor parallelism."""

REFUSED = {"int8-channel": "does not compute with"}
PAGE = Path(__file__).parents[3] / "docs" / "models.md"


def run(families: list[str], folder: Path) -> dict[str, Outcome]:
    program = [sys.executable, "-m", "tests.engine.weights.family_updates", str(folder), *families]
    subprocess.run(program, check=True, capture_output=True, timeout=90 * len(families))
    read = ((folder / f"{family}.json").read_text() for family in families)
    return {outcome.family: outcome for outcome in (Outcome(**json.loads(text)) for text in read)}


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return run(list(MECHANISMS), tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def all_tried(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return run(ALL, tmp_path_factory.mktemp("families"))


def insist(outcome: Outcome) -> None:
    assert outcome.started
    if outcome.family in REFUSED:
        assert REFUSED[outcome.family] in outcome.refused
        assert outcome.updates == 0
        return
    assert outcome == Outcome(outcome.family, started=True, updates=2, equal=True)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", MECHANISMS)
def test_a_mechanism_is_proven_or_refused(family: str, tried: dict[str, Outcome]) -> None:
    insist(tried[family])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ALL)
def test_a_family_is_proven_or_refused(family: str, all_tried: dict[str, Outcome]) -> None:
    insist(all_tried[family])
    assert all_tried[family].row() in PAGE.read_text().splitlines()
