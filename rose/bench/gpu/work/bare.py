"""The kernels on a machine that has torch and Triton and none of ROSE's other dependencies."""

import sys
import types
from pathlib import Path

from rose.bench.gpu.modules import absent

ROOT = Path(__file__).resolve().parents[4]
NEEDED_BY_THE_PACKAGE = ("blake3", "cryptography", "numba", "zstandard")


def allow_kernels_alone() -> None:
    """Let modules of `weight_transfer` be imported where the package itself cannot be."""
    if absent(NEEDED_BY_THE_PACKAGE) and "weight_transfer" not in sys.modules:
        package = types.ModuleType("weight_transfer")
        package.__path__ = [str(ROOT / "weight_transfer")]
        sys.modules["weight_transfer"] = package
