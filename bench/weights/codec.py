"""Cost of coding an update: bytes for each change, GB/s, and memory beside the weights."""

import ctypes
import gc
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from bench.weights.steps import Step, adam_step
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
from weight_transfer.kernels.cpu.changes import find_changes
from weight_transfer.kernels.cpu.digest import scatter, scatter_and_sum
from weight_transfer.kernels.cpu.simd import compiled

Bits = NDArray[np.unsignedinteger[Any]]
Parts = tuple[bytes, ...]
Encode = Callable[[Bits, Bits, int], Parts]
Decode = Callable[[Bits, Parts, int], Bits]
_ESCAPE = 0xFFFF


def size_of(name: str, old: Bits, new: Bits, columns: int) -> int:
    """Bytes that a scheme takes for this step. Raises AssertionError when it loses a bit."""
    encode, decode = SCHEMES[name]
    parts = encode(old, new, columns)
    assert np.array_equal(decode(old, parts, columns), new), f"{name} does not come back"
    return sum(len(part) for part in parts)


def _coo(old: Bits, new: Bits, _: int) -> Parts:
    indices = np.flatnonzero(old != new)
    return indices.astype("<u4").tobytes(), new[indices].tobytes()


def _coo_back(old: Bits, parts: Parts, _: int) -> Bits:
    out = old.copy()
    out[np.frombuffer(parts[0], "<u4")] = np.frombuffer(parts[1], old.dtype)
    return out


def _gap_xor(old: Bits, new: Bits, _: int) -> Parts:
    indices = np.flatnonzero(old != new)
    gaps = np.diff(indices, prepend=-1) - 1
    large = gaps >= _ESCAPE
    short = np.where(large, _ESCAPE, gaps).astype("<u2")
    values = old[indices] ^ new[indices]
    return tuple(_packed(a) for a in (short, gaps[large].astype("<u8"), values))


def _gap_xor_back(old: Bits, parts: Parts, _: int) -> Bits:
    gaps = np.frombuffer(_unpacked(parts[0]), "<u2").astype(np.int64)
    gaps[gaps == _ESCAPE] = np.frombuffer(_unpacked(parts[1]), "<u8").astype(np.int64)
    indices = np.cumsum(gaps + 1) - 1
    out = old.copy()
    out[indices] ^= np.frombuffer(_unpacked(parts[2]), old.dtype)
    return out


def _row_column(old: Bits, new: Bits, columns: int) -> Parts:
    indices = np.flatnonzero(old != new)
    rows, at = np.divmod(indices, columns)
    counts = np.bincount(rows, minlength=old.size // columns).astype("<u4")
    first = np.diff(rows, prepend=-1) != 0
    gaps = np.where(first, at, np.diff(at, prepend=0)).astype("<u4" if columns > 65_535 else "<u2")
    return tuple(_packed(a) for a in (counts, gaps, new[indices]))


def _row_column_back(old: Bits, parts: Parts, columns: int) -> Bits:
    counts = np.frombuffer(_unpacked(parts[0]), "<u4").astype(np.int64)
    kind = "<u4" if columns > 65_535 else "<u2"
    gaps = np.frombuffer(_unpacked(parts[1]), kind).astype(np.int64)
    rows = np.repeat(np.arange(counts.size), counts)
    total = np.cumsum(gaps)
    ends = np.cumsum(counts)
    before = np.concatenate([[0], total[ends[:-1] - 1]]) * (np.arange(counts.size) > 0)
    before[ends - counts == 0] = 0
    out = old.copy()
    out[rows * columns + total - before[rows]] = np.frombuffer(_unpacked(parts[2]), old.dtype)
    return out


def _dense_xor(old: Bits, new: Bits, _: int) -> Parts:
    return (_packed(old ^ new),)


def _dense_xor_back(old: Bits, parts: Parts, _: int) -> Bits:
    return old ^ np.frombuffer(_unpacked(parts[0]), old.dtype)


SCHEMES: Mapping[str, tuple[Encode, Decode]] = MappingProxyType(
    {
        "coo": (_coo, _coo_back),
        "gap_xor_zstd": (_gap_xor, _gap_xor_back),
        "row_column_zstd": (_row_column, _row_column_back),
        "dense_xor_zstd": (_dense_xor, _dense_xor_back),
    }
)


def _packed(values: NDArray[Any]) -> bytes:
    return zstandard.ZstdCompressor().compress(np.ascontiguousarray(values).tobytes())


def _unpacked(raw: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(raw)


CHUNK_BYTES = 64 << 20


def sizes(steps: Sequence[Step]) -> dict[str, object]:
    """Return bytes of one update of these tensors; ours with containers and the manifest's part."""
    changed = sum(step.changed for step in steps)
    weights = sum(step.old.bits.size for step in steps)
    raw = sum(step.old.bits.nbytes for step in steps)
    found: dict[str, object] = {"density": changed / weights, "changed": changed, "raw_bytes": raw}
    totals = {level.value: _all_of_ours(steps, level) for level in Level}
    for name in SCHEMES:
        totals[name] = sum(_theirs(name, step) for step in steps)
    found["bytes"] = totals
    found["bytes_per_change"] = {name: size / max(1, changed) for name, size in totals.items()}
    return found


def _all_of_ours(steps: Sequence[Step], level: Level) -> int:
    """With the manifest as it crosses a link: compressed."""
    made = [_ours(step, level) for step in steps]
    listed = b"\n".join(line for _, line in made)
    return sum(size for size, _ in made) + len(zlib.compress(listed))


def _theirs(name: str, step: Step) -> int:
    # Parts of a stacked tensor are sent row by row; a vector is one row.
    columns = step.old.row_elements if len(step.old.shape) > 1 else step.old.bits.size
    return size_of(name, step.old.bits, step.new.bits, columns) if step.changed else 0


def _ours(step: Step, level: Level) -> tuple[int, bytes]:
    """Bytes of the chunks of a tensor, and its part of the manifest."""
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


PEAK_ROWS, PEAK_COLUMNS = 8192, 4096
_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def peaks(rate: float, seed: int) -> list[dict[str, object]]:
    """Rows of peak memory over a chunk's dense bytes; at this density and with all anew."""
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
