"""Builders shared by the tests of weight transfer."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from weight_transfer.apply.receiver import Receiver
from weight_transfer.chunk_store import ChunkStore
from weight_transfer.format.digest import digest_of
from weight_transfer.format.manifest import Manifest, TensorUpdate
from weight_transfer.format.tensors import WIDTHS, TensorBits, WeightClass, unsigned

SPECIAL = {
    "bfloat16": [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFFF, 0x0001],
    "float16": [0x0000, 0x8000, 0x7C00, 0xFC00, 0x7E00, 0x7E01, 0xFFFF, 0x0001],
    "float32": [0x00000000, 0x80000000, 0x7F800000, 0x7FC00001, 0xFFFFFFFF, 1],
    "float64": [0, 1 << 63, 0x7FF8000000000001, (1 << 64) - 1],
    "float8_e4m3fn": [0x00, 0x80, 0x7F, 0xFF],
    "float8_e5m2": [0x00, 0x80, 0x7C, 0xFF],
    "int64": [0, 1 << 63, (1 << 64) - 1],
    "int8": [0, 0x80, 0xFF],
}
KINDS = {1: WeightClass(3, 4), 2: WeightClass(7, 8), 4: WeightClass(23, 8), 8: WeightClass(52, 8)}


def tensor(name: str, shape: tuple[int, ...], seed: int, dtype: str = "bfloat16") -> TensorBits:
    rng = np.random.default_rng(seed)
    width = WIDTHS[dtype]
    bits = rng.integers(0, 1 << (8 * width), int(np.prod(shape)), dtype=unsigned(width))
    return TensorBits(name, dtype, shape, bits)


def stepped(old: TensorBits, seed: int, density: float) -> TensorBits:
    """Move a share `density` of the weights by a few ulps."""
    rng = np.random.default_rng(seed)
    moved = rng.random(old.bits.size) < density
    ulps = rng.integers(-3, 4, old.bits.size).astype(f"<i{old.bits.itemsize}")
    bits = np.where(moved, old.bits + ulps.view(old.bits.dtype), old.bits)
    return TensorBits(old.name, old.dtype, old.shape, bits.astype(old.bits.dtype))


@st.composite
def steps(draw: st.DrawFn) -> tuple[TensorBits, TensorBits]:
    """Draw (old, new) with special values and every density between none and all."""
    dtype = draw(st.sampled_from(sorted(SPECIAL)))
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=0, max_size=3)))
    old = tensor("t", shape, draw(st.integers(0, 99)), dtype)
    new = stepped(old, draw(st.integers(0, 99)), draw(st.sampled_from([0, 0.01, 0.1, 0.5, 1])))
    for bits in (old.bits, new.bits):
        at = draw(st.lists(st.integers(0, bits.size - 1), max_size=8))
        bits[at] = draw(
            st.lists(st.sampled_from(SPECIAL[dtype]), min_size=len(at), max_size=len(at))
        )
    return old, new


def model(seed: int) -> dict[str, TensorBits]:
    shapes = {"embed": (40, 16), "proj": (30, 16), "bias": (30,), "scale": (), "frozen": (7, 3)}
    return {name: tensor(name, shape, seed + k) for k, (name, shape) in enumerate(shapes.items())}


def next_model(
    old: dict[str, TensorBits], seed: int, density: float = 0.2
) -> dict[str, TensorBits]:
    """Step every tensor but `frozen`."""
    return {
        name: t if name == "frozen" else stepped(t, seed + k, density)
        for k, (name, t) in enumerate(old.items())
    }


def chunks_of(store: ChunkStore, *updates: Manifest | TensorUpdate) -> dict[str, bytes]:
    return {ref.id: store.get(ref.id) for update in updates for ref in update.chunks}


def assert_holds(receiver: Receiver, tensors: dict[str, TensorBits], version: int) -> None:
    """Check the version, every bit of these tensors and their digests."""
    assert receiver.version == version
    for name, wanted in tensors.items():
        np.testing.assert_array_equal(receiver.tensors[name].bits, wanted.bits, name)
        assert receiver.digests[name] == digest_of(wanted.bits)
