"""Devices as torch describes them, and times of their work."""

import math
import statistics
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.pieces import PieceError, absent


def insist_device(place: str) -> None:
    """Raise PieceError when torch cannot use it."""
    import torch

    if place.startswith("cuda") and not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"is built for CUDA {built}" if built else "is built without CUDA"
        raise PieceError(
            f"torch {torch.__version__} {why} and sees no GPU; use a Python whose torch does"
        )


def told(place: str) -> dict[str, Any]:
    """Return name, capability and CUDA of a torch device."""
    import torch

    if not place.startswith("cuda"):
        return {"device": {"name": place}}
    properties = torch.cuda.get_device_properties(place)
    return {
        "device": {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "torch_cuda": torch.version.cuda,
            "most_bytes_allocated": torch.cuda.max_memory_allocated(place),
        }
    }


WARM_UP_ROUNDS = 2


def synchronise(place: str) -> None:
    """Wait until the device has done everything."""
    if place.startswith("cuda"):
        import torch

        torch.cuda.synchronize()


def seconds(work: Callable[[], Any], rounds: int, place: str) -> list[float]:
    """Return the seconds of each round, after rounds that compile and warm up."""
    spent = []
    for _ in range(rounds + WARM_UP_ROUNDS):
        synchronise(place)
        started_s = time.perf_counter()
        work()
        synchronise(place)
        spent.append(time.perf_counter() - started_s)
    return spent[WARM_UP_ROUNDS:]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, nearest-rank 99th percentile, both ends, and the count."""
    ordered = sorted(values)
    return {
        "p50": statistics.median(ordered),
        "p99": ordered[math.ceil(0.99 * len(ordered)) - 1],
        "least": ordered[0],
        "most": ordered[-1],
        "count": len(ordered),
    }


def rate(moved_bytes: int, spent_s: Sequence[float]) -> dict[str, float]:
    """Return the bandwidth at the median time."""
    found = spread(spent_s)
    return {
        "gb_s": moved_bytes / found["p50"] / 1e9,
        **{f"{k}_s": found[k] for k in ("p50", "most")},
    }


ROOT = Path(__file__).resolve().parents[3]
NEEDED_BY_THE_PACKAGE = ("blake3", "cryptography", "numba", "zstandard")


def allow_kernels_alone() -> None:
    """Let modules of `weight_transfer` be imported where the package itself cannot be."""
    if absent(NEEDED_BY_THE_PACKAGE) and "weight_transfer" not in sys.modules:
        package = types.ModuleType("weight_transfer")
        package.__path__ = [str(ROOT / "weight_transfer")]
        sys.modules["weight_transfer"] = package
