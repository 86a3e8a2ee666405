"""Rectangles of a local parameter, in numpy and in torch: the same bits, cast where asked for."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weight_transfer.errors import TensorFormatError
from weight_transfer.format.tensors import bits_of
from weight_transfer.publish.sharding import LocalBits
from weight_transfer.torch import local_weights


@given(st.integers(0, 9), st.integers(1, 5), st.integers(1, 6), st.integers(0, 4))
def test_a_rectangle_is_read_row_by_row(offset: int, rows: int, width: int, spare: int) -> None:
    stride = width + spare
    weights = torch.randn(offset + rows * stride).bfloat16()
    bits = bits_of(weights)
    wanted = np.concatenate(
        [bits[offset + r * stride : offset + r * stride + width] for r in range(rows)]
    )
    # A view that begins in the middle of its storage, as a shard of a flat buffer does.
    inside = torch.cat([torch.zeros(3).bfloat16(), weights])[3:]
    for local in (LocalBits("bfloat16", bits), local_weights({"w": inside})["w"]):
        assert (local.dtype, local.elements) == ("bfloat16", weights.numel())
        np.testing.assert_array_equal(local.read(offset, rows, width, stride), wanted)


def test_weights_are_cast_as_they_are_read_and_integers_are_not() -> None:
    state = {"w": torch.randn(4, 6), "t": torch.randn(6, 4).t(), "ids": torch.arange(5)}
    local = local_weights(state, torch.bfloat16)
    assert {name: one.dtype for name, one in local.items()} == {
        "w": "bfloat16",
        "t": "bfloat16",
        "ids": "int64",
    }
    for name in ("w", "t"):
        wanted = bits_of(state[name].bfloat16())
        np.testing.assert_array_equal(local[name].read(0, 4, 6, 6), wanted)
    np.testing.assert_array_equal(local["ids"].read(1, 3, 1, 1), [1, 2, 3])


def test_a_type_that_is_not_carried_is_refused() -> None:
    with pytest.raises(TensorFormatError, match="complex128"):
        local_weights({"w": torch.zeros(3, dtype=torch.complex128)})["w"].read(0, 3, 1, 1)
