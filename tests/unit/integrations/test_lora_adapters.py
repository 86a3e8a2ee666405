"""Adapters of PEFT as a trainer publishes them: what is read of them, cast, checked and refused."""

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from rose.errors import RefusedError
from rose.integrations.lora import LoraSettings, NamedAdapter, digest_of_base, is_adapted
from rose.integrations.named_weights import UnfitWeightsError
from weight_transfer import TensorBits, tensor_bits

torch = pytest.importorskip("torch")

LAYER = "model.layers.0.mlp.up_proj"
A, B = (f"base_model.model.{LAYER}.lora_{letter}.weight" for letter in "AB")
FIELDS = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "use_rslora": True}


def base() -> dict[str, TensorBits]:
    name = f"{LAYER}.weight"
    return {name: tensor_bits(name, torch.ones(6, 5).bfloat16())}


def tensors(r: int = 4) -> dict[str, Any]:
    return {A: torch.rand(r, 5), B: torch.rand(6, r)}


class PeftType(Enum):
    LORA = "LORA"


def test_settings_come_from_pefts_config_or_its_fields() -> None:
    wanted = LoraSettings(4, 8.0, use_rslora=True)
    assert LoraSettings.of(FIELDS) == wanted
    assert LoraSettings.of(SimpleNamespace(**FIELDS | {"peft_type": PeftType.LORA})) == wanted
    assert LoraSettings.of({"r": 4, "lora_alpha": 8}) == LoraSettings(4, 8.0)


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("use_dora", True, "use_dora=True"),
        ("bias", "all", "bias='all'"),
        ("modules_to_save", ["lm_head"], "modules_to_save="),
        ("rank_pattern", {"q_proj": 2}, "rank_pattern="),
        ("init_lora_weights", "pissa_niter_4", "init_lora_weights='pissa_niter_4'"),
        ("peft_type", "IA3", "peft_type=IA3"),
    ],
)
def test_other_adapters_are_refused_by_the_field(field: str, value: object, line: str) -> None:
    with pytest.raises(RefusedError, match=line):
        LoraSettings.of(FIELDS | {field: value})


def test_tensors_are_published_in_the_dtype_of_what_they_adapt() -> None:
    digest = digest_of_base(base())
    named = NamedAdapter(base(), LoraSettings(4, 8.0), digest)
    given = tensors()
    named.take(given.items())
    found = named.finish()
    assert {each.dtype for each in found.values()} == {"bfloat16"}
    assert (found[A].bits == tensor_bits(A, given[A].bfloat16()).bits).all()
    assert (named.adapter.base, named.adapter.r, named.adapter.lora_alpha) == (digest, 4, 8.0)


def test_what_does_not_fit_the_checkpoint_is_named() -> None:
    named = NamedAdapter(base(), LoraSettings(4, 8.0), "0" * 64)
    named.take(tensors(r=3).items())
    with pytest.raises(UnfitWeightsError, match=r"lora_A is \(3, 5\), and r=4"):
        named.finish()


def test_other_ranks_only_take_part() -> None:
    named = NamedAdapter(base(), LoraSettings(4, 8.0), "")
    named.take(tensors().items(), keep=False)
    with pytest.raises(UnfitWeightsError, match="no tensors"):
        named.finish()


def test_a_model_of_peft_is_known() -> None:
    assert is_adapted(SimpleNamespace(peft_config={}, active_adapters=["default"]))
    assert not is_adapted(torch.nn.Linear(1, 1))
