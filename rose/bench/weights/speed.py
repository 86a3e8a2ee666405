"""How fast the codec is: GB/s of model, on one core and on all, beside plain reading."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rose.bench.weights.synthetic import Step, adam_step
from weight_transfer.format.chunk import decode_chunk, encode_chunk
from weight_transfer.format.codec import Level
from weight_transfer.format.digest import digest_of
from weight_transfer.kernels.cpu.changes import find_changes
from weight_transfer.kernels.cpu.digest import scatter, scatter_and_sum
from weight_transfer.kernels.cpu.simd import compiled

Item = TypeVar("Item")
GB = 1e9
REPEATS = 5
# A chunk of 64 MiB, which no cache holds.
ROWS, COLUMNS = 8192, 4096


def speeds(rate: float, seed: int) -> dict[str, object]:
    """All figures at one density; each core works on a chunk of its own."""
    cores = os.cpu_count() or 1
    steps = [adam_step(ROWS, COLUMNS, rate, seed + n) for n in range(cores)]
    size = steps[0].old.bits.nbytes
    found: dict[str, object] = {"density": steps[0].density, "cores": cores, "chunk_bytes": size}

    def measure(name: str, work: Callable[[Step], object]) -> None:
        found[name] = _gb_s(work, steps, size)

    measure("read", lambda s: (_read(s.old.bits.view("<u8")), _read(s.new.bits.view("<u8"))))
    measure("diff", lambda s: find_changes(s.old.bits, s.new.bits, s.old.bits.size // 4))
    measure("digest", lambda s: digest_of(s.old.bits))
    for level in Level:
        measure(f"encode_{level}", lambda s, level=level: _encode(s, level))  # type: ignore[misc]
        made = {id(step): _encode(step, level) for step in steps}
        measure(f"decode_{level}", lambda s, made=made: _decode(s, made[id(s)]))  # type: ignore[misc]
    found["scatter"] = _scatters(steps)
    return found


def _encode(step: Step, level: Level) -> bytes:
    return encode_chunk(step.old, step.new, (0, step.old.rows), 0, level).encoded


def _decode(step: Step, encoded: bytes) -> object:
    return decode_chunk(encoded, step.old, 0)


def _scatters(steps: Sequence[Step]) -> dict[str, float]:
    """Millions of weights a second on one core, without and with the digest."""
    step = steps[0]
    change = decode_chunk(_encode(step, Level.FAST), step.old, 0)
    target = step.old.bits.copy()
    plain = _best(lambda: scatter(target, change.indices, change.values))
    summed = _best(lambda: scatter_and_sum(target, change.indices, change.values))
    count = change.indices.size / 1e6
    return {"plain_m_s": count / plain, "with_digest_m_s": count / summed}


def _gb_s(work: Callable[[Item], object], items: Sequence[Item], size: int) -> dict[str, float]:
    one = _best(lambda: work(items[0]))
    with ThreadPoolExecutor(len(items)) as pool:
        everywhere = _best(lambda: list(pool.map(work, items)))
    return {"one": size / one / GB, "all": size * len(items) / everywhere / GB}


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of some runs, the first of which compiles."""
    work()
    taken = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began_s)
    return min(taken)


@compiled
def _read(words: NDArray[np.uint64]) -> np.uint64:
    """Nothing but reading: what any comparison of weights has to do at least."""
    seen = np.uint64(0)
    for at in range(words.size):
        seen |= words[at]
    return seen
