"""Cost of coding an update: bytes for each change, GB/s, and memory beside the weights."""

import ctypes
import gc
import os
import random
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from weight_transfer.format.checkpoint import read_model_dir
from weight_transfer.format.chunk import (
    EncodedChunk,
    chunk_id,
    decode_chunk,
    encode_chunk,
    overwrite_chunk,
    row_ranges,
)
from weight_transfer.format.delta_codec import Level
from weight_transfer.format.digest import digest_of
from weight_transfer.format.manifest import ChunkRef, TensorUpdate, hex_digest
from weight_transfer.format.tensors import TensorBits
from weight_transfer.kernels.cpu import compare, scatter, scatter_and_sum
from weight_transfer.kernels.simd import compiled

_ESCAPE = 0xFFFF
PEER = "gap_xor_zstd"
CHUNK_BYTES = 64 << 20
GB = 1e9
REPEATS = 5
# A chunk of 64 MiB, which no cache holds.
ROWS, COLUMNS = 8192, 4096
PEAK_ROWS, PEAK_COLUMNS = 8192, 4096
_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
WEIGHT_DEVIATION = 0.02
_SAMPLE = (256, 1024)
BATCH = 16
# The first updates of AdamW are as large as its rate; later ones are what training looks like.
SETTLE = 6
_MAPS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Step:
    """One tensor before and after a step."""

    old: TensorBits
    new: TensorBits

    @property
    def changed(self) -> int:
        return int((self.old.bits != self.new.bits).sum())

    @property
    def density(self) -> float:
        return self.changed / self.old.bits.size


def bf16(values: NDArray[np.float32]) -> NDArray[np.unsignedinteger[Any]]:
    """Return bits of float32 values, rounded to nearest even."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def adam_step(rows: int, columns: int, rate: float, seed: int) -> Step:
    """Return a step of weights [rows, columns] of deviation 0.02, masters in float32.

    An update is the rate times a normal variable cut at 3: Adam's is its first moment over the root
    of its second.
    """
    rng = np.random.default_rng(seed)
    size = rows * columns
    master = rng.standard_normal(size, np.float32) * np.float32(WEIGHT_DEVIATION)
    update = np.clip(rng.standard_normal(size, np.float32), -3, 3) * np.float32(rate)
    shape = (rows, columns)
    return Step(
        TensorBits("w", "bfloat16", shape, bf16(master)),
        TensorBits("w", "bfloat16", shape, bf16(master - update)),
    )


def rate_for(density: float, seed: int = 0) -> float:
    """Return the rate at which such a step changes this share of weights, by bisection."""
    low, high = 1e-9, 1.0
    for _ in range(40):
        rate = (low * high) ** 0.5
        if adam_step(*_SAMPLE, rate, seed).density < density:
            low = rate
        else:
            high = rate
    return high


def training_steps(policy: Path, rate: float, count: int, seed: int) -> Iterator[list[Step]]:
    """Yield steps of all tensors between consecutive checkpoints, supervised, with fp32 masters."""
    import torch

    from bench.demo.frozen_lake.data import demonstrate
    from bench.demo.frozen_lake.task import random_lake
    from bench.demo.training.forward import published, reply_logprobs, values_of

    rng = random.Random(seed)  # noqa: S311 - an experiment, not a secret
    old: Mapping[str, TensorBits] = read_model_dir(policy)
    masters = {name: value.requires_grad_(True) for name, value in values_of(old).items()}
    optimiser = torch.optim.AdamW(list(masters.values()), lr=rate, weight_decay=0.0)
    for number in range(SETTLE + count):
        shown = [
            demonstrate(random_lake(_MAPS + number * BATCH + i), rng, long_turns=False)
            for i in range(BATCH)
        ]
        chosen = [[at for at, mine in enumerate(one.learned) if mine] for one in shown]
        loss = -reply_logprobs(masters, [one.tokens for one in shown], chosen).mean()
        optimiser.zero_grad()
        torch.autograd.backward(loss)
        optimiser.step()
        new = _copied(published(masters))
        if number >= SETTLE:
            yield [Step(old[name], new[name]) for name in sorted(new)]
        old = new


def _copied(tensors: Mapping[str, TensorBits]) -> dict[str, TensorBits]:
    return {n: TensorBits(n, t.dtype, t.shape, t.bits.copy()) for n, t in tensors.items()}


Bits = NDArray[np.unsignedinteger[Any]]


def peer_bytes(old: Bits, new: Bits) -> int:
    """Return the bytes of gaps and XORed values, each by zstd: another scheme without loss."""
    indices = np.flatnonzero(old != new)
    gaps = np.diff(indices, prepend=-1) - 1
    large = gaps >= _ESCAPE
    short = np.where(large, _ESCAPE, gaps).astype("<u2")
    values = old[indices] ^ new[indices]
    compressor = zstandard.ZstdCompressor()
    parts = (short, gaps[large].astype("<u8"), values)
    return sum(len(compressor.compress(np.ascontiguousarray(part).tobytes())) for part in parts)


def sizes(steps: Sequence[Step]) -> dict[str, object]:
    """Return bytes of one update of these tensors; ours with containers and the manifest's part."""
    changed = sum(step.changed for step in steps)
    weights = sum(step.old.bits.size for step in steps)
    raw = sum(step.old.bits.nbytes for step in steps)
    found: dict[str, object] = {"density": changed / weights, "changed": changed, "raw_bytes": raw}
    totals = {level.value: _all_of_ours(steps, level) for level in Level}
    totals[PEER] = sum(peer_bytes(step.old.bits, step.new.bits) for step in steps if step.changed)
    found["bytes"] = totals
    found["bytes_per_change"] = {name: size / max(1, changed) for name, size in totals.items()}
    return found


def _all_of_ours(steps: Sequence[Step], level: Level) -> int:
    """Return bytes with the manifest, compressed as it crosses a link."""
    made = [_ours(step, level) for step in steps]
    listed = b"\n".join(line for _, line in made)
    return sum(size for size, _ in made) + len(zlib.compress(listed))


def _ours(step: Step, level: Level) -> tuple[int, bytes]:
    """Return bytes of the chunks of a tensor, and its part of the manifest."""
    chunks = [
        encode_chunk(step.old, step.new, r, 0, level) for r in row_ranges(step.old, CHUNK_BYTES)
    ]
    if not step.changed:
        chunks = []
    update = TensorUpdate(
        step.old.name,
        step.old.dtype,
        step.old.shape,
        hex_digest(0),
        hex_digest(1),
        tuple(_reference(chunk) for chunk in chunks),
    )
    listed = msgspec.json.encode(update)
    return sum(len(chunk.encoded) for chunk in chunks), listed


def _reference(chunk: EncodedChunk) -> ChunkRef:
    header = chunk.header
    rows = (header.first_row, header.end_row)
    codec = header.encoding.name.lower()
    return ChunkRef(chunk_id(chunk.encoded), rows, codec, len(chunk.encoded), header.changed)


Item = TypeVar("Item")


def speeds(rate: float, seed: int) -> dict[str, object]:
    """Return all figures at one density; each core works on a chunk of its own."""
    cores = os.cpu_count() or 1
    steps = [adam_step(ROWS, COLUMNS, rate, seed + n) for n in range(cores)]
    size = steps[0].old.bits.nbytes
    found: dict[str, object] = {"density": steps[0].density, "cores": cores, "chunk_bytes": size}

    def measure(name: str, work: Callable[[Step], object]) -> None:
        found[name] = _gb_s(work, steps, size)

    measure("read", lambda s: (_read(s.old.bits.view("<u8")), _read(s.new.bits.view("<u8"))))
    measure("diff", lambda s: compare(s.old.bits, s.new.bits, s.old.bits.size // 4))
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
    """Return millions of weights a second on one core, without and with the digest."""
    step = steps[0]
    change = decode_chunk(_encode(step, Level.FAST), step.old, 0)
    target = step.old.bits.copy()
    plain = _best(lambda: scatter(target, change.indices, change.new))
    summed = _best(lambda: scatter_and_sum(target, change.indices, change.new))
    count = change.indices.size / 1e6
    return {"plain_m_s": count / plain, "with_digest_m_s": count / summed}


def _gb_s(work: Callable[[Item], object], items: Sequence[Item], size: int) -> dict[str, float]:
    one = _best(lambda: work(items[0]))
    with ThreadPoolExecutor(len(items)) as pool:
        everywhere = _best(lambda: list(pool.map(work, items)))
    return {"one": size / one / GB, "all": size * len(items) / everywhere / GB}


def _best(work: Callable[[], object]) -> float:
    """Return seconds of the fastest of some runs, the first of which compiles."""
    work()
    taken = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began_s)
    return min(taken)


@compiled
def _read(words: NDArray[np.uint64]) -> np.uint64:
    """Read all words: the least that any comparison of weights has to do."""
    seen = np.uint64(0)
    for at in range(words.size):
        seen |= words[at]
    return seen


def peaks(rate: float, seed: int) -> list[dict[str, object]]:
    """Return rows of peak memory over a chunk's dense bytes; at this density and with all anew."""
    step = adam_step(PEAK_ROWS, PEAK_COLUMNS, rate, seed)
    return [row for case in (step, _anew(step, seed)) for row in _of(case)]


def _anew(step: Step, seed: int) -> Step:
    bits = np.random.default_rng(seed).integers(0, 1 << 16, step.old.bits.size, dtype="<u2")
    return Step(step.old, TensorBits("w", "bfloat16", step.old.shape, bits))


def _of(step: Step) -> list[dict[str, object]]:
    size = step.old.bits.nbytes
    copy = TensorBits("w", "bfloat16", step.old.shape, step.old.bits.copy())
    rows: list[dict[str, object]] = []
    for level in Level:
        encode = partial(encode_chunk, step.old, step.new, (0, step.old.rows), 0, level)
        encoded = encode().encoded  # Compiles, too.
        decode = partial(decode_chunk, encoded, step.old, 0)
        overwrite = partial(overwrite_chunk, encoded, copy, 0)
        decode()
        row: dict[str, object] = {"density": step.density, "level": level.value}
        for name, work in (("encode", encode), ("decode", decode), ("overwrite", overwrite)):
            copy.bits[:] = step.old.bits
            row[f"{name}_chunks"] = _peak_bytes(work) / size
        rows.append(row)
    return rows


def _peak_bytes(work: Callable[[], object]) -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _CLEAR.write_text("5")  # The peak is the present from here on.
    before = _status_bytes("VmRSS")
    work()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    line = next(one for one in _STATUS.read_text().splitlines() if one.startswith(f"{name}:"))
    return int(line.split()[1]) << 10
