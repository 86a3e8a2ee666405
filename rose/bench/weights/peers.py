"""Others' schemes for sparse updates, as honestly as they can be had in a few lines.

coo              index u32 and value, nothing compressed       vLLM, verl, ROSE's paper
gap_xor_zstd     gaps u16 with escapes, XOR of values, zstd    NeMo-RL
row_column_zstd  row counts, column gaps, new values, zstd     PULSE
dense_xor_zstd   XOR of all weights, zstd                      slime, SkyRL
zstd runs at its default level; each scheme is decoded and compared before its bytes count.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

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
