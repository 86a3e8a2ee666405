"""Warm kernels: numba compiles on first use, for seconds; better at start than while serving."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from weight_transfer.chunk import decode_chunk, encode_chunk
from weight_transfer.codec import Level
from weight_transfer.digest import digest_of, updated
from weight_transfer.kernels.exchange import Change, Int64s
from weight_transfer.kernels.mixing import scatter
from weight_transfer.kernels.processor import processor_of
from weight_transfer.tensors import Bits, TensorBits, unsigned
from weight_transfer.vllm.flat import live_bits
from weight_transfer.vllm.rectangle import Rectangle

if TYPE_CHECKING:
    import torch

_ROWS, _COLUMNS = 64, 64


def warm_kernels(base: Mapping[str, TensorBits], device: torch.device) -> None:
    """Run everything that an update runs, on a few weights of each type that `base` has.

    `device`: where the engine's weights are.
    """
    kinds = {tensor.dtype: tensor.bits.itemsize for tensor in base.values()}
    for dtype, width in kinds.items():
        rng = np.random.default_rng(0)
        bits = rng.integers(0, 200, _ROWS * _COLUMNS).astype(unsigned(width))
        old = TensorBits("warm", dtype, (_ROWS, _COLUMNS), bits)
        digest = digest_of(bits)
        for step in (1, 2, 16):  # dense, bitmap, and the two kinds of sparse
            new = bits.copy()
            new[::step] += 1
            changed = TensorBits("warm", dtype, old.shape, new)
            for level in Level:
                chunk = encode_chunk(old, changed, (0, _ROWS), digest, level)
                change = decode_chunk(chunk.encoded, old, digest)
                updated(digest, change.indices, bits[change.indices], change.values)
        scatter(bits.copy(), change.indices, change.values)
        _scatter(bits.copy(), change.indices, change.values, device)


def _scatter(flat: Bits, indices: Int64s, values: Bits, device: torch.device) -> None:
    import torch

    transposed = Rectangle("", "", 0, 0, (_ROWS, _COLUMNS), (_COLUMNS, 1), (1, _ROWS))
    picked, places = transposed.locate(indices)
    transposed.digest_part(flat)
    # What a device runs under a pause has to be there too, kernels of its own included.
    signed = torch.from_numpy(flat.view(f"<i{flat.itemsize}")).to(device)
    target = live_bits(signed)
    change = Change(target, places, values[picked], values[picked])
    processor_of(target).stage([change], change.new.nbytes * _ROWS).run()
