"""An adapter's settings are signed with its version, and its tensors have to fit the base."""

from dataclasses import dataclass, replace

import pytest

from weight_transfer.errors import AdapterError, ManifestError, SignatureError
from weight_transfer.format.adapter import base_digest, check_adapter
from weight_transfer.format.manifest import CODEC, Adapter, Manifest, TensorUpdate
from weight_transfer.format.signing import SigningKey

KEY = SigningKey.from_hex("01" * 32)
ADAPTER = Adapter("ab" * 32, 8, 16.0)
PLAIN = Manifest(
    "job", 1, 1, CODEC, "t", 1.0, 2.0, (TensorUpdate("w", "float32", (), "0" * 16, "0" * 16, ()),)
)
LAYER = "model.layers.0.self_attn.q_proj"


@dataclass(frozen=True)
class ShapeOnly:
    shape: tuple[int, ...]


BASE = {f"{LAYER}.weight": ShapeOnly((32, 64)), "model.norm.weight": ShapeOnly((64,))}
A, B = (f"base_model.model.{LAYER}.lora_{letter}.weight" for letter in "AB")
FITS = {A: ShapeOnly((8, 64)), B: ShapeOnly((32, 8))}


def test_the_settings_are_signed_and_whole_weights_have_none() -> None:
    signed = replace(PLAIN, adapter=ADAPTER).signed(KEY)
    read = Manifest.from_bytes(signed.to_bytes(), KEY.verify_key)
    assert read.adapter == ADAPTER
    other = replace(read, adapter=Adapter("ab" * 32, 8, 32.0))
    with pytest.raises(SignatureError):
        other.verify(KEY.verify_key)
    assert not read.says_as_much_as(other)
    assert b"adapter" not in PLAIN.signed(KEY).to_bytes(), "others read it as before"


@pytest.mark.parametrize("r", [0, 5_000, 1.5])
def test_settings_out_of_bounds_are_no_manifest(r: float) -> None:
    raw = replace(PLAIN, adapter=ADAPTER).to_bytes()
    with pytest.raises(ManifestError):
        Manifest.from_bytes(raw.replace(b'"r":8', f'"r":{r}'.encode()))


def test_a_base_is_known_by_all_of_its_tensors() -> None:
    digests = {"a": 1, "b": 2}
    name = base_digest(digests)
    assert base_digest({"b": 2, "a": 1}) == name
    others = ({"a": 1}, {"a": 1, "b": 3}, {"a": 1, "c": 2}, {**digests, "c": 0})
    assert name not in {base_digest(each) for each in others}


def test_what_fits_is_taken() -> None:
    check_adapter(ADAPTER, FITS, BASE)


@pytest.mark.parametrize(
    ("tensors", "line"),
    [
        ({}, "no tensors"),
        (FITS | {"model.norm.weight": ShapeOnly((64,))}, "model.norm.weight is not carried"),
        (
            FITS | {A.replace("lora_A", "lora_magnitude_vector"): ShapeOnly((32,))},
            "is not carried",
        ),
        ({A: FITS[A]}, r"q_proj.lora_B is missing, and r=8 and the base make it \(32, 8\)"),
        (
            FITS | {A: ShapeOnly((4, 64))},
            r"q_proj.lora_A is \(4, 64\), and r=8 and the base make",
        ),
        (
            {name.replace("q_proj", "x_proj"): each for name, each in FITS.items()},
            "target_modules: the base has no linear layer model.layers.0.self_attn.x_proj",
        ),
        ({"base_model.model.model.norm.lora_A.weight": FITS[A]}, "no linear layer model.norm"),
    ],
)
def test_what_does_not_fit_is_named(tensors: dict[str, ShapeOnly], line: str) -> None:
    with pytest.raises(AdapterError, match=line):
        check_adapter(ADAPTER, tensors, BASE)
