"""The probe of the sampler of drafts: exact samplers pass, and others are refused by a line."""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executor.errors import ExecutorError
from executor.vllm.compat import check_features
from executor.vllm.drafts import _expanded, check_sampler

Sampled = Callable[..., Any]


def exact(drafts: Any, *others: Any) -> Any:
    """Accept a draft as often as the policy samples it, else sample another token."""
    probabilities = others[4].softmax(-1)
    chosen = probabilities.gather(1, drafts.long()[:, None])[:, 0]
    rest = probabilities.scatter(1, drafts.long()[:, None], 0).multinomial(1)[:, 0]
    accepted = torch.rand(len(drafts)) < chosen
    return torch.stack([torch.where(accepted, drafts.long(), rest), rest], 1)


def takes_every_draft(drafts: Any, *_: Any) -> Any:
    return torch.stack([drafts, drafts], 1)


def samples_the_most_likely(drafts: Any, *others: Any) -> Any:
    best = others[4].argmax(-1)
    return torch.stack([best, best], 1)


def with_temperature(logits: Any, _: Any, metadata: Any) -> Any:
    return logits / metadata.temperature[:, None]


def without_temperature(logits: Any, *_: Any) -> Any:
    return logits


def test_an_exact_sampler_passes_and_leaves_the_process_its_randomness() -> None:
    before = torch.random.get_rng_state()
    check_sampler(
        SimpleNamespace(apply_sampling_constraints=with_temperature, rejection_sample=exact)
    )
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("constraints", "sample"),
    [
        (with_temperature, takes_every_draft),
        (with_temperature, samples_the_most_likely),
        (without_temperature, exact),
    ],
)
def test_a_sampler_that_changes_what_is_sampled_is_refused(
    constraints: Sampled, sample: Sampled
) -> None:
    sampler = SimpleNamespace(apply_sampling_constraints=constraints, rejection_sample=sample)
    with pytest.raises(ExecutorError, match=r"drafts change what is sampled: .*; leave out --spec"):
        check_sampler(sampler)


def test_each_draft_gets_the_value_of_its_request() -> None:
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    values = torch.tensor([0.5, 0.25, 0.0])
    assert _expanded(values, ends, 5, 0, 1).tolist() == [0.5, 0.5, 1, 1, 1]
    assert _expanded(torch.tensor([3, 4, 5]), ends, 5).tolist() == [3, 3, 5, 5, 5]


TABLE = "num_speculative_tokens_per_batch_size"


@pytest.mark.parametrize(
    ("drafts", "refused"),
    [
        ({"method": "eagle", "model": "policy/draft"}, ""),
        ({"method": "eagle", "model": "policy/draft/"}, ""),
        ({"method": "eagle", "model": "elsewhere/draft"}, "policy/draft"),
        ({"method": "ngram", TABLE: [(1, 8, 2)]}, ""),
        ({"method": "suffix", TABLE: None}, ""),
        ({"method": "suffix", TABLE: [(1, 8, 2)]}, "suffix drafts by size of batch"),
    ],
)
def test_a_replica_has_drafts_that_its_vllm_can_carry_out(
    drafts: dict[str, object], refused: str
) -> None:
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(**drafts),
        model_config=SimpleNamespace(model="policy", logits_processors=None),
        kv_transfer_config=None,
    )
    with pytest.raises(ExecutorError, match=refused) if refused else nullcontext():
        check_features(config)
