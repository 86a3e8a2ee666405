"""The wire format is pinned: chunks and a manifest written once must stay readable for ever.

`golden/wire.json` holds chunks of format 1 and a manifest of format 2. Chunks are decoded only
where zstd shaped them (its output may change between releases), and compared byte for byte where
all planes are raw.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weight_transfer.format.chunk import chunk_id, decode_chunk, encode_chunk
from weight_transfer.format.delta_codec import Encoding, Level
from weight_transfer.format.manifest import Manifest
from weight_transfer.format.signing import SigningKey, VerifyKey
from weight_transfer.format.tensors import TensorBits

GOLDEN = json.loads((Path(__file__).parent / "golden" / "wire.json").read_text())


def tensor_like(shape: list[int], bits: list[int]) -> TensorBits:
    return TensorBits("w", "bfloat16", tuple(shape), np.array(bits, dtype="<u2"))


def scrambled(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights that look random, by arithmetic alone; some small ones go up or down by one."""
    mixed = np.arange(1, size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(31)
    old = (0x3B00 + mixed % 512).astype("<u2")
    moves = (old < 0x3C00) & ((mixed >> np.uint64(40)) % 8 == 0)
    step = np.where((mixed >> np.uint64(50)) % 2 == 0, 1, -1)
    return old, np.where(moves, old + step, old).astype("<u2")


@pytest.mark.parametrize("case", GOLDEN["chunks"], ids=lambda case: case["name"])
def test_golden_chunks_decode(case: dict[str, Any]) -> None:
    old, new = (tensor_like(case["shape"], case[which]) for which in ("old", "new"))
    encoded = bytes.fromhex(case["encoded"])
    assert chunk_id(encoded) == case["id"]
    change = decode_chunk(encoded, old, case["base_digest"])
    bits = old.bits.copy()
    bits[change.indices] = change.new
    np.testing.assert_array_equal(bits, new.bits)
    if case["raw"]:
        level = Level(case.get("level", "fast"))
        assert encode_chunk(old, new, (0, old.rows), case["base_digest"], level).encoded == encoded


def test_a_large_compact_chunk_is_pinned() -> None:
    """No zstd shapes it: only its name is kept here."""
    old, new = scrambled(80_000)
    before, after = (TensorBits("w", "bfloat16", (800, 100), bits) for bits in (old, new))
    encoded = encode_chunk(before, after, (0, 800), 7, Level.COMPACT).encoded
    assert encoded[5] == Encoding.COMPACT
    assert chunk_id(encoded) == GOLDEN["large_compact"]


def test_golden_manifest_is_written_and_read_alike_and_its_signature_holds() -> None:
    golden = GOLDEN["manifest"]
    lines = "".join(f"{line}\n" for line in golden["lines"])
    raw = bytes.fromhex(golden["head"]) + lines.encode()
    manifest = Manifest.from_bytes(raw, VerifyKey(GOLDEN["verify_key"]))
    assert manifest.to_bytes() == raw
    assert SigningKey.from_hex("07" * 32).verify_key.hex == GOLDEN["verify_key"]
