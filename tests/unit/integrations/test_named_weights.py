"""Whatever wrappers a trainer has, what is published is the checkpoint's tensors, bit for bit."""

from collections.abc import Mapping

import numpy as np
import pytest

from rose.integrations.named_weights import NamedWeights, UnfitWeightsError, checkpoint_name
from tests.policies import EMBED, NORM, checkpoint, weights
from weight_transfer import TensorBits

torch = pytest.importorskip("torch")

HEAD = "lm_head.weight"


def taken(base: Mapping[str, TensorBits], *named: tuple[str, object]) -> dict[str, TensorBits]:
    collected = NamedWeights(base)
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


def test_another_name_of_tied_weights_is_left_out() -> None:
    new = weights(seed=1)
    found = taken(checkpoint(weights()), *new.items(), (HEAD, new[EMBED]))
    assert HEAD not in found


def test_tied_weights_that_the_checkpoint_has_twice_are_published_twice() -> None:
    base, new = weights(), weights(seed=1)
    twice = checkpoint({**base, HEAD: base[EMBED]})
    found = taken(twice, *new.items())
    assert np.array_equal(found[HEAD].bits, found[EMBED].bits)


def test_a_tensor_that_the_checkpoint_lacks_is_refused_by_name() -> None:
    new = weights()
    with pytest.raises(UnfitWeightsError, match=r"the checkpoint has no extra\.bias$"):
        taken(checkpoint(new), *new.items(), ("extra.bias", torch.ones(3)))


def test_a_tensor_that_the_trainer_lacks_is_refused_by_name() -> None:
    new = weights()
    with pytest.raises(UnfitWeightsError, match=r"the trainer does not give model\.norm\.weight"):
        taken(checkpoint(new), (EMBED, new[EMBED]))


def test_another_shape_is_refused_with_both() -> None:
    new = weights()
    with pytest.raises(UnfitWeightsError, match=r"norm\.weight is \(5,\), not \(4,\)"):
        taken(checkpoint(new), (EMBED, new[EMBED]), (NORM, torch.ones(5)))


def test_many_missing_names_are_counted_and_not_listed() -> None:
    base = checkpoint({f"layer.{k}.weight": torch.full((2,), float(k)) for k in range(9)})
    with pytest.raises(UnfitWeightsError, match="and 5 more") as told:
        taken(base)
    assert "\n" not in str(told.value)


def test_adapters_are_refused_with_what_to_do() -> None:
    new = weights()
    with pytest.raises(UnfitWeightsError, match="merge them"):
        taken(checkpoint(new), *new.items(), ("model.norm.lora_A.weight", torch.ones(2, 4)))


def test_every_shard_is_gathered_though_one_before_it_does_not_fit() -> None:
    shards = [Sharded(torch.ones(5)), Sharded(weights()[EMBED])]
    with pytest.raises(UnfitWeightsError):
        taken(checkpoint(weights()), (NORM, shards[0]), (EMBED, shards[1]))
    assert [each.gathered for each in shards] == [1, 1]


def test_ranks_that_do_not_publish_gather_too_and_keep_nothing() -> None:
    collected, shard = NamedWeights({}), Sharded(torch.ones(5))
    collected.take([(NORM, shard)], keep=False)  # type: ignore[list-item]  # a stand-in
    assert shard.gathered == 1
    assert collected.finish() == {}
