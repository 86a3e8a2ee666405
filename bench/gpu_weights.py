"""How fast a GPU compares, sums and overwrites weights, beside its own copy; and that it is right.

    python bench/gpu_weights.py --gib 4 > out/bench/gpu_weights.json

Needs a CUDA device, torch, triton and numpy, and none of ROSE's other dependencies. Every kernel
is first compared with a numpy reference, bit for bit, in all widths; then each is timed on bf16
tensors of `--gib` GiB (more than any cache) of which `--density` changed. `gb_s` counts the bytes
that must be read and written; `share_of_copy` is that beside a device-to-device copy, read and
write, in the same run. Without a GPU it says so and exits with 2.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
WIDTHS = (1, 2, 4, 8)
CLASSES = {1: (3, 4), 2: (7, 8), 4: (23, 8), 8: (52, 8)}
CLASS_COUNT = 256
CHUNK_BYTES = 64 << 20
GAMMA, M1, M2 = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
Bits = NDArray[Any]


def load_kernels() -> tuple[Any, Any, Any]:
    """Return (processor, DeviceBits, WeightClass) without the package's other dependencies."""
    package = types.ModuleType("weight_transfer")
    package.__path__ = [str(ROOT / "weight_transfer")]
    sys.modules.setdefault("weight_transfer", package)
    from weight_transfer.kernels.device.bits import DeviceBits
    from weight_transfer.kernels.device.processor import DEVICE
    from weight_transfer.tensors import WeightClass

    return DEVICE, DeviceBits, WeightClass


def mixed(index: Bits, value: Bits) -> Bits:
    """What a weight adds to the digest."""
    z = (index.astype(np.uint64) + np.uint64(1)) * GAMMA + value.astype(np.uint64)
    z = (z ^ (z >> np.uint64(30))) * M1
    z = (z ^ (z >> np.uint64(27))) * M2
    return z ^ (z >> np.uint64(31))


def summed(index: Bits, value: Bits) -> int:
    """Sum of it, mod 2^64."""
    return int(mixed(index, value).sum(dtype=np.uint64))


def zigzag(old: Bits, new: Bits) -> Bits:
    """Codes of changes."""
    bits = 8 * old.itemsize
    delta = new - old
    sign = (delta.view(f"<i{old.itemsize}") >> (bits - 1)).view(delta.dtype)
    return (delta << np.array(1, delta.dtype)) ^ sign


def ends_of(counts: Bits) -> tuple[Bits, Bits, Bits]:
    """The two smallest classes with changes are one, and so are the two largest."""
    changed = np.flatnonzero(counts)
    present = changed[1:-1] if changed.size > 2 else changed[:1]
    ends = np.array([changed[0], present[0], present[-1], changed[-1]], np.uint8)
    joined = np.clip(changed, present[0], present[-1])
    sizes = np.bincount(joined, counts[changed], CLASS_COUNT)[present].astype(np.int64)
    return ends, present.astype(np.uint8), np.cumsum(sizes) - sizes


def ranked(old: Bits, changed: Bits, shift: int, mask: int) -> tuple[Bits, Bits, Bits]:
    """Return (class counts, order by class, rank gaps in it) of the changed indices."""
    kinds = ((old >> np.array(shift, old.dtype)) & np.array(mask, old.dtype)).astype(np.int64)
    counts = np.bincount(kinds[changed], minlength=CLASS_COUNT)
    lowest, first, last, highest = (int(end) for end in ends_of(counts)[0])
    keys = np.where((lowest <= kinds) & (kinds <= highest), np.clip(kinds, first, last), kinds)
    order = np.argsort(keys, kind="stable")
    starts = np.searchsorted(keys[order], np.arange(CLASS_COUNT))
    ranks = np.empty(old.size, np.int64)
    ranks[order] = np.arange(old.size) - starts[keys[order]]
    by = np.argsort(keys[changed], kind="stable")
    rank, key = ranks[changed][by], keys[changed][by]
    gaps = rank.copy()
    gaps[1:] -= np.where(key[1:] == key[:-1], rank[:-1] + 1, 0)
    return counts, by, gaps


def step_of(width: int, size: int, density: float) -> tuple[Bits, Bits]:
    """Random old weights and new ones."""
    rng = np.random.default_rng(width)
    old = rng.integers(0, 1 << (8 * width), size, dtype=f"<u{width}")
    new = old.copy()
    moved = rng.random(size) < density
    new[moved] += rng.integers(1, 5, np.count_nonzero(moved), dtype=old.dtype)
    return old, new


def same(what: str, found: Any, wanted: Any) -> None:  # noqa: ANN401 -- numbers and arrays
    """Insist on equality of every bit."""
    if not np.array_equal(found, wanted):
        raise AssertionError(f"{what}: the device and numpy differ")


def check(place: str, width: int, size: int, density: float) -> int:
    """Compare every kernel with numpy; returns how many comparisons were made."""
    import torch

    device, device_bits, weight_class = load_kernels()
    old, new = step_of(width, size, density)
    changed = np.flatnonzero(old != new)

    def held(bits: Bits) -> Any:  # noqa: ANN401 -- a type of the package under test
        return device_bits(torch.from_numpy(bits.view(f"<i{width}").copy()).to(place))

    live, first = held(old), 1 << 33
    found = device.compare(live, held(new), size, first)
    at = changed + first
    growth = (summed(at, new[changed]) - summed(at, old[changed])) % (1 << 64)
    shift, bits = CLASSES[width]
    kind = weight_class(shift, bits)
    counts, by, gaps = ranked(old, changed, shift, (1 << bits) - 1)
    found_counts = found.class_counts(kind)
    rank_gaps, sorted_codes = found.by_class(kind, *ends_of(counts))
    marks = device.mark(live, held(new), first)
    indices, values = device.expand(live, found.gaps, found.codes)
    write = device.prepare(live, changed, new[changed], at)
    written = write.run()
    results = {
        "digest": (device.digest(held(old), first), summed(np.arange(size) + first, old)),
        "count": (found.count, changed.size),
        "growth": (found.growth, growth),
        "gaps": (found.gaps, np.diff(changed, prepend=-1) - 1),
        "codes": (found.codes, zigzag(old[changed], new[changed])),
        "class counts": (found_counts, counts),
        "rank gaps": (rank_gaps, gaps),
        "sorted codes": (sorted_codes, zigzag(old[changed], new[changed])[by]),
        "bitmap": (marks.bitmap, np.packbits(old != new, bitorder="little")),
        "indices": (indices, changed),
        "values": (values, new[changed]),
        "written": (written.growth, growth),
        "wrong": (written.wrong, 0),
        "read back": (device.read(live), new),
        "too many": (device.compare(held(old), held(new), changed.size - 1, 0) is None, True),
    }
    for what, (one, other) in results.items():
        same(f"{what}, {8 * width} bit, {density:.0%} changed", one, other)
    return len(results)


def timed(work: Callable[[], Any], rounds: int) -> float:
    """Median seconds of `work`, which the host waits for; compiled and warm."""
    import torch

    spent_s = []
    for at in range(rounds + 2):
        torch.cuda.synchronize()
        started_s = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if at >= 2:
            spent_s.append(time.perf_counter() - started_s)
    return statistics.median(spent_s)


def measure(nbytes: int, density: float, rounds: int) -> dict[str, dict[str, float]]:
    """Time each kernel on bf16 weights of `nbytes`."""
    import torch

    device, device_bits, weight_class = load_kernels()
    size = nbytes // 2
    torch.manual_seed(0)
    weights = torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    old = device_bits(weights.view(torch.int16))
    moved = torch.rand(size, device="cuda") < density
    new = device_bits(old.flat + moved)
    del moved
    other = torch.empty_like(old.flat)
    places = (old.flat != new.flat).nonzero().view(-1).cpu().numpy()
    values = device.read(device_bits(new.flat[torch.from_numpy(places).cuda()]))
    write = device.prepare(device_bits(old.flat.clone()), places, values, places)
    chunk = slice(0, min(size, CHUNK_BYTES // 2))
    kind = weight_class(7, 8)
    part = device.compare(old[chunk], new[chunk], size, 0)

    def prepared() -> None:
        found = device.compare(old, new, size, 0)
        _ = found.gaps, found.codes

    def ranks() -> None:
        part.by_class(kind, *ends_of(part.class_counts(kind)))

    # Both passes over places, indices and values; weights are read twice and written once.
    written = places.size * (2 * (8 + 8 + 2) + 3 * 2)
    works: dict[str, tuple[int, Callable[[], Any]]] = {
        "copy": (2 * nbytes, lambda: other.copy_(old.flat)),
        "digest": (nbytes, lambda: device.digest(old, 0)),
        "diff": (2 * nbytes, lambda: device.compare(old, new, size, 0)),
        "diff_and_changes_to_host": (2 * nbytes, prepared),
        "compact_ranks_of_a_chunk": (4 * chunk.stop, ranks),
        "overwrite_and_read_back": (written, write.run),
    }  # fmt: skip
    found = {}
    for name, (moved_bytes, work) in works.items():
        seconds = timed(work, rounds)
        found[name] = {"ms": seconds * 1e3, "gb_s": moved_bytes / seconds / 1e9}
    for row in found.values():
        row["share_of_copy"] = row["gb_s"] / found["copy"]["gb_s"]
    return found


def missing() -> str:
    """Why this machine cannot run it, empty when it can."""
    try:
        import torch
        import triton  # noqa: F401 -- only whether it is there
    except ImportError as error:
        return f"{error.name} is not installed"
    return "" if torch.cuda.is_available() else "no NVIDIA GPU is visible"


def main() -> int:
    """Check, measure, print JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gib", type=float, default=4.0, help="size of each tensor")
    parser.add_argument("--density", type=float, default=0.02, help="share of changed weights")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--check-size", type=int, default=(1 << 22) + 5, help="weights compared")
    options = parser.parse_args()
    if reason := missing():
        sys.stderr.write(f"gpu_weights: {reason}; run it on a machine with a GPU and torch\n")
        return 2
    import torch

    checks = sum(
        check("cuda", width, options.check_size, density)
        for width in WIDTHS
        for density in (0.001, options.density, 0.6)
    )
    report = {
        "card": torch.cuda.get_device_name(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "triton")}
        | {"cuda": torch.version.cuda},
        "checks_passed": checks,
        "check_size": options.check_size,
        "tensor_bytes": int(options.gib * (1 << 30)),
        "density": options.density,
        "rounds": options.rounds,
        "measured": measure(int(options.gib * (1 << 30)), options.density, options.rounds),
    }
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
