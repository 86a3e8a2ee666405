from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from weight_transfer.errors import TensorFormatError
from weight_transfer.format.checkpoint import read_model_dir, read_safetensors
from weight_transfer.format.tensors import TensorBits, bits_of, tensor_bits, tensor_of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_bits_survive_torch_both_ways(dtype: torch.dtype) -> None:
    weights = torch.tensor([[0.0, -0.0, float("nan")], [float("inf"), 1e-40, -1.5]]).to(dtype)
    bits = tensor_bits("w", weights)
    back = tensor_of(bits)
    assert (back.dtype, back.shape) == (weights.dtype, weights.shape)
    np.testing.assert_array_equal(bits_of(back), bits.bits)
    assert bits.bits[0] != bits.bits[1], "-0 is a weight of its own"


def test_a_file_reads_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(7, 3).bfloat16(),
        "b": torch.randn(5),
        "c": torch.tensor(2.5, dtype=torch.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read = read_model_dir(tmp_path)
    assert read.keys() == tensors.keys()
    for name, weights in tensors.items():
        assert (read[name].dtype, read[name].shape) == (
            str(weights.dtype).removeprefix("torch."),
            tuple(weights.shape),
        )
        np.testing.assert_array_equal(read[name].bits, bits_of(weights))
    assert (read["a"].rows, read["a"].row_elements) == (7, 3)
    assert (read["c"].rows, read["c"].row_elements) == (1, 1)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff" * 8,
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"{{{{",
        (60).to_bytes(8, "little")
        + b'{"w":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}}'.ljust(60),
        (60).to_bytes(8, "little")
        + b'{"w":{"dtype":"I9","shape":[0],"data_offsets":[0,0]}}'.ljust(60),
        (20).to_bytes(8, "little") + b'{"w":7}'.ljust(20),
    ],
)
def test_a_damaged_file_is_one_clear_error(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw)
    with pytest.raises(TensorFormatError):
        read_safetensors(path)


def test_a_directory_without_weights_or_with_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TensorFormatError, match=r"no \*"):
        read_model_dir(tmp_path)
    for name in ("a", "b"):
        save_file({"w": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(TensorFormatError, match="two files"):
        read_model_dir(tmp_path)


def test_bits_that_do_not_fit_are_refused() -> None:
    with pytest.raises(TensorFormatError):
        TensorBits("w", "bfloat16", (3,), np.zeros(4, dtype="<u2"))
    with pytest.raises(TensorFormatError):
        TensorBits("w", "bfloat16", (4,), np.zeros(4, dtype="<u4"))
    with pytest.raises(TensorFormatError):
        TensorBits("w", "int4", (4,), np.zeros(4, dtype="u1"))
    with pytest.raises(TensorFormatError):
        bits_of(torch.zeros(3, dtype=torch.complex128))
