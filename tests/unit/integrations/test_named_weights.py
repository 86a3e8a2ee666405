"""Whatever wrappers a trainer has, what is published is the checkpoint's tensors, bit for bit."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rose.integrations.named_weights import (
    NamedWeights,
    UnfitWeightsError,
    checkpoint_name,
    ties_embeddings,
)
from tests.harness.policies import EMBED, NORM, checkpoint, weights
from weight_transfer import TensorBits, tensor_bits

torch = pytest.importorskip("torch")

HEAD = "lm_head.weight"


def taken(
    base: Mapping[str, TensorBits],
    *named: tuple[str, object],
    tied: bool | None = None,
    frozen: str = "",
) -> dict[str, TensorBits]:
    collected = NamedWeights(base, tied=tied, frozen=frozen)
    collected.take(named)  # type: ignore[arg-type]  # stand-ins for tensors
    return collected.finish()


class Sharded:
    """A DTensor as far as it matters: gathering it is collective."""

    def __init__(self, whole: "torch.Tensor") -> None:
        self.whole, self.gathered = whole, 0

    def full_tensor(self) -> "torch.Tensor":
        self.gathered += 1
        return self.whole


def test_masters_are_cast_to_the_dtypes_of_the_checkpoint() -> None:
    new = weights(seed=1)
    found = taken(checkpoint(weights()), *new.items())
    assert found.keys() == new.keys()
    for name in new:
        assert found[name].dtype == "bfloat16"
        assert np.array_equal(found[name].bits, checkpoint(new)[name].bits)


def test_a_frozen_part_stays_the_checkpoints_given_or_not() -> None:
    base, new = checkpoint(weights()), weights(seed=1)
    begin = NORM.rpartition(".")[0]
    rest = {name: each for name, each in new.items() if not name.startswith(begin)}
    for given in (new, rest):
        found = taken(base, *given.items(), frozen=f"{begin},")
        assert np.array_equal(found[NORM].bits, base[NORM].bits)
        assert {name: each.bits.tolist() for name, each in found.items() if name in rest} == {
            name: each.bits.tolist() for name, each in checkpoint(new).items() if name in rest
        }
    with pytest.raises(UnfitWeightsError, match="the trainer does not give"):
        taken(base, *rest.items())
    with pytest.raises(UnfitWeightsError, match=r"frozen: the checkpoint has no visual\."):
        taken(base, *new.items(), frozen="visual.")


@pytest.mark.parametrize(
    "name",
    [
        "module.model.norm.weight",
        "_orig_mod.model.norm.weight",
        "module._fsdp_wrapped_module.model._checkpoint_wrapped_module.norm.weight",
    ],
)
def test_what_wrappers_put_into_a_name_is_no_part_of_it(name: str) -> None:
    assert checkpoint_name(name) == NORM


def test_what_was_taken_does_not_change_with_the_next_step_of_training() -> None:
    same = {name: tensor.bfloat16() for name, tensor in weights().items()}
    found = taken(checkpoint(weights()), *same.items())
    before = found[NORM].bits.copy()
    same[NORM].add_(1.0)
    assert np.array_equal(found[NORM].bits, before)


def test_tied_weights_are_published_as_often_as_the_checkpoint_has_them() -> None:
    base, new = weights(), weights(seed=1)
    assert HEAD not in taken(checkpoint(base), *new.items(), (HEAD, new[EMBED]))
    twice = checkpoint({**base, HEAD: base[EMBED]})
    found = taken(twice, *new.items(), tied=True)
    assert np.array_equal(found[HEAD].bits, found[EMBED].bits)
    for tied in (None, False):
        with pytest.raises(UnfitWeightsError, match=r"the trainer does not give lm_head\.weight$"):
            taken(twice, *new.items(), tied=tied)


def test_equal_norms_are_two_tensors() -> None:
    norms = {f"layer.{k}.norm.weight": torch.ones(4) for k in range(2)}
    first, last = norms
    with pytest.raises(UnfitWeightsError, match=f"the trainer does not give {last}$"):
        taken(checkpoint(norms), (first, norms[first]), tied=True)
    with pytest.raises(UnfitWeightsError, match=f"the checkpoint has no {last}$"):
        taken(checkpoint({first: norms[first]}), *norms.items(), tied=True)


def test_a_head_with_other_values_is_no_other_name_of_the_embedding() -> None:
    new = weights(seed=1)
    for head, tied in ((new[EMBED] + 1, True), (new[EMBED], False)):
        with pytest.raises(UnfitWeightsError, match=r"the checkpoint has no lm_head\.weight"):
            taken(checkpoint(weights()), *new.items(), (HEAD, head), tied=tied)


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ('{"tie_word_embeddings": true}', True),
        ('{"tie_word_embeddings": false}', False),
        ('{"tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}}', True),
        ('{"tie_word_embeddings": "yes"}', None),
        ("{}", None),
        ("[]", None),
        ("{", None),
    ],
)
def test_the_config_says_whether_embeddings_are_tied(
    tmp_path: Path, config: str, *, tied: bool | None
) -> None:
    (tmp_path / "config.json").write_text(config)
    assert ties_embeddings(tmp_path) is tied
    assert ties_embeddings(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("held", "given"),
    [
        ("float8_e4m3fn", "bfloat16"),
        ("int8", "float32"),
        ("uint8", "int8"),
        ("bfloat16", "int64"),
        ("float32", "complex64"),
        ("bool", "uint8"),
        ("bfloat16", "float8_e5m2"),
    ],
)
def test_a_cast_that_loses_more_than_a_masters_precision_is_refused(held: str, given: str) -> None:
    base = {"w": tensor_bits("w", torch.ones(2).to(getattr(torch, held)))}
    with pytest.raises(UnfitWeightsError, match=rf"w is torch\.{given}, .* not cast to {held}"):
        taken(base, ("w", torch.ones(2).to(getattr(torch, given))))


def test_two_names_of_one_tensor_with_other_values_are_refused() -> None:
    new = weights()
    twice = ("module." + NORM, new[NORM] + 1)
    with pytest.raises(UnfitWeightsError, match=r"gives model\.norm\.weight twice"):
        taken(checkpoint(new), *new.items(), twice)
    assert taken(checkpoint(new), *new.items(), ("module." + NORM, new[NORM]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"extra.bias": torch.ones(3)}, r"the checkpoint has no extra\.bias$"),
        ({NORM: None}, r"the trainer does not give model\.norm\.weight"),
        ({NORM: torch.ones(5)}, r"norm\.weight is \(5,\), not \(4,\)"),
        ({"model.norm.lora_A.weight": torch.ones(2, 4)}, "merge them"),
    ],
    ids=["one too many", "one too few", "another shape", "an adapter"],
)
def test_names_and_shapes_that_the_checkpoint_has_not_are_refused(
    changes: dict[str, Any], words: str
) -> None:
    given = {name: one for name, one in (weights() | changes).items() if one is not None}
    with pytest.raises(UnfitWeightsError, match=words):
        taken(checkpoint(weights()), *given.items())


def test_many_missing_names_are_counted_and_not_listed() -> None:
    base = checkpoint({f"layer.{k}.weight": torch.full((2,), float(k)) for k in range(9)})
    with pytest.raises(UnfitWeightsError, match="and 5 more") as told:
        taken(base)
    assert "\n" not in str(told.value)


def test_every_shard_is_gathered_though_one_before_it_does_not_fit() -> None:
    odd = torch.ones(2, dtype=torch.complex128)
    shards = [Sharded(torch.ones(5)), Sharded(odd), Sharded(weights()[EMBED])]
    named = zip((NORM, "odd", EMBED), shards, strict=True)
    with pytest.raises(UnfitWeightsError, match="the checkpoint has no odd, and its dtype"):
        taken(checkpoint(weights()), *named)
    assert [each.gathered for each in shards] == [1, 1, 1]


def test_ranks_that_do_not_publish_gather_too_and_keep_nothing() -> None:
    collected, shard = NamedWeights({}), Sharded(torch.ones(5))
    collected.take([(NORM, shard)], keep=False)  # type: ignore[list-item]  # a stand-in
    assert shard.gathered == 1
    assert collected.finish() == {}
