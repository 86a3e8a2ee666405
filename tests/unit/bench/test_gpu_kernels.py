"""What is measured of kernels, in Triton's interpreter and in a process that has nothing else."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from rose.bench.gpu.models import SHAPES
from rose.bench.gpu.work.bare import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
BARE = """
import json, sys
for absent in ("numba", "zstandard", "blake3", "cryptography"):
    sys.modules[absent] = None
from rose.bench.gpu.errors import PieceError
from rose.bench.gpu.sizes import Sizes
from rose.bench.gpu.work import comparing, copying, kernels, updating
from rose.bench.gpu.work.bare import allow_kernels_alone
"""


def printed(program: str) -> dict[str, object]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BARE + program],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_every_kernel_is_compared_with_numpy_in_every_width() -> None:
    found = printed("""
counts = [
    comparing.compare("cpu", width, size, 0.05)
    for width, size in zip(comparing.WIDTHS, (600, 4100, 600, 600), strict=True)
]
print(json.dumps({"counts": counts}))
""")
    assert found == {"counts": [15, 15, 15, 15]}


def test_one_bit_that_differs_is_told() -> None:
    found = printed("""
comparing.zigzag = lambda old, new: (new - old) ^ 1
try:
    comparing.compare("cpu", 2, 600, 0.05)
except PieceError as error:
    print(json.dumps({"told": str(error)}))
""")
    assert found == {"told": "codes, 16 bit, 5.0% changed: the device and numpy differ"}


def test_each_kernel_is_timed_beside_the_copy_of_the_same_run() -> None:
    found = printed("""
print(json.dumps(kernels.speed(Sizes(gib=2**-15, rounds=3), "cpu")))
""")
    assert list(found) == [
        "copy",
        "digest",
        "diff",
        "encode_to_host",
        "compact_ranks_of_a_chunk",
        "decode_a_chunk",
        "overwrite_and_read_back",
    ]
    copy = found["copy"]["gb_s"]  # type: ignore[index]
    for row in found.values():
        assert row["share_of_copy"] == pytest.approx(row["gb_s"] / copy)  # type: ignore[index]
        assert 0 < row["p50_s"] <= row["most_s"]  # type: ignore[index]


def test_an_update_of_a_whole_model_is_written_and_read_back() -> None:
    found = printed("""
print(json.dumps(updating.run(Sizes(model="tiny", rounds=3, density=0.02), "cpu")))
""")
    weights = SHAPES["tiny"].weights
    assert (found["weights"], found["tensors"]) == (weights, 21)
    assert found["changed"] == pytest.approx(0.02 * weights, rel=0.2)
    assert found["overwrite_s"]["count"] == 3  # type: ignore[index]
    assert found["device"] == {"name": "cpu"}


def test_a_weight_that_reads_wrong_ends_the_update() -> None:
    found = printed("""
allow_kernels_alone()
from weight_transfer.kernels.device import overwrite
from weight_transfer.kernels.overwrite import Written
overwrite.DeviceOverwrite.run = lambda self: Written(0, 0, 0)
try:
    updating.run(Sizes(model="tiny", rounds=3, density=0.02), "cpu")
except PieceError as error:
    print(json.dumps({"told": str(error)}))
""")
    assert str(found["told"]).endswith("weights do not read as they were written")


def test_copies_are_timed_within_and_across() -> None:
    found = printed("""
print(json.dumps(copying.run(Sizes(gib=2**-10, rounds=3), "cpu")))
""")
    assert [row["bytes"] for row in found["within_card"]] == [64 << 20]  # type: ignore[attr-defined]
    assert found["to_host"]["gb_s"] > 0  # type: ignore[index]
    assert found["from_host"]["gb_s"] > 0  # type: ignore[index]


def test_the_model_that_is_updated_has_eight_billion_weights() -> None:
    assert SHAPES["8b"].weights == 8_030_261_248
    assert len(SHAPES["8b"].tensors()) == 291


def test_without_a_gpu_the_process_of_a_piece_says_so_in_its_answer(tmp_path: object) -> None:
    out = f"{tmp_path}/answer.json"
    done = subprocess.run(
        [sys.executable, "-m", "rose.bench.gpu.measure", "copy", "--out", out],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr[-2000:]
    with open(out) as file:
        assert json.load(file)["failed"].endswith("sees no GPU; use a Python whose torch does")
