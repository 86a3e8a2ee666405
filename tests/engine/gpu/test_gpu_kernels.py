"""Measurements of kernels, in Triton's interpreter and in a process without anything else."""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from bench.gpu.machine import ROOT
from bench.gpu.models import SHAPES

pytestmark = [
    pytest.mark.engine,
    pytest.mark.starts_others,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="Triton is not installed"
    ),
]
# One process for all: it spends seconds on imports. What is broken is broken last.
PROGRAM = """
import json, sys
for absent in ("numba", "zstandard", "blake3", "cryptography"):
    sys.modules[absent] = None
from bench.gpu.pieces import PieceError, Sizes
from bench.gpu import kernels

def told(work, *arguments):
    try:
        work(*arguments)
    except PieceError as error:
        return str(error)

small = Sizes(model="tiny", gib=2**-15, rounds=3, density=0.02)
kernels._NONZERO_WEIGHTS = 5000
found = {
    "speed": kernels.run(small, "cpu")["speed"],
    "update": kernels.update(small, "cpu"),
    "copy": kernels.copy_speeds(Sizes(gib=2**-10, rounds=3), "cpu"),
}
import numpy as np
from weight_transfer.kernels import device
device.DeviceExchange.run = lambda self, back=False: np.zeros((1, 2), np.int64)
found["unwritten update"] = told(kernels.update, small, "cpu")
found["unwritten weights"] = told(kernels.run, small, "cpu")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def test_each_kernel_is_timed_beside_the_copy_of_the_same_run(found: dict[str, Any]) -> None:
    speed = found["speed"]
    assert list(speed) == [
        "copy",
        "digest",
        "diff",
        "encode_to_host",
        "compact_ranks_of_a_chunk",
        "overwrite_and_read_back",
    ]
    for row in speed.values():
        assert row["share_of_copy"] == pytest.approx(row["gb_s"] / speed["copy"]["gb_s"])
        assert 0 < row["p50_s"] <= row["most_s"]
    (scattered,) = (row for row in speed.values() if "touched_share_of_copy" in row)
    # Nearly each of 2% of the weights is alone in its sector of 16: 14 + 3 × 32 bytes for 14 + 6.
    over_asked = scattered["touched_share_of_copy"] / scattered["share_of_copy"]
    assert over_asked == pytest.approx((14 + 96 * 0.87) / 20, rel=0.05)


def test_an_update_of_a_whole_model_is_written_and_read_back(found: dict[str, Any]) -> None:
    update, weights = found["update"], SHAPES["tiny"].weights
    assert (update["weights"], update["tensors"]) == (weights, 21)
    assert update["changed"] == pytest.approx(0.02 * weights, rel=0.2)
    assert update["overwrite_s"]["count"] == 3
    assert update["device"] == {"name": "cpu"}


def test_weights_that_do_not_read_as_written_end_the_piece(found: dict[str, Any]) -> None:
    assert found["unwritten update"].endswith("weights do not read as they were written")
    assert found["unwritten weights"] == "the overwritten weights are not the new ones"


def test_copies_are_timed_within_and_across(found: dict[str, Any]) -> None:
    copy = found["copy"]
    assert [row["bytes"] for row in copy["within_card"]] == [64 << 20]
    assert copy["to_host"]["gb_s"] > 0
    assert copy["from_host"]["gb_s"] > 0


def test_the_model_that_is_updated_has_eight_billion_weights() -> None:
    assert SHAPES["8b"].weights == 8_030_261_248
    assert len(SHAPES["8b"].tensors()) == 291
