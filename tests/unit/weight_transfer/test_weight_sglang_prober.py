"""The probe's scratch in an SGLang's KV cache holds afterwards what it held before."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from weight_transfer.errors import ProbeError
from weight_transfer.sglang import SglangProber

SLOTS = 64


def runner_of(pool: Any) -> Any:
    return SimpleNamespace(
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.arange(128).reshape(2, SLOTS)),
        page_size=1,
        model_config=SimpleNamespace(vocab_size=100),
    )


def tensors() -> list[Any]:
    return [torch.rand(SLOTS, 2, 4) for _ in range(2)]


@pytest.mark.parametrize(
    "pool",
    [
        SimpleNamespace(k_buffer=tensors(), v_buffer=tensors()),
        SimpleNamespace(kv_buffer=tensors()),
    ],
    ids=["keys and values", "latent attention"],
)
def test_the_cache_is_as_it_was(pool: Any) -> None:
    runner = runner_of(pool)
    caches = [tensor for kind in vars(pool).values() for tensor in kind]
    before = [tensor.clone() for tensor in [*caches, runner.req_to_token_pool.req_to_token]]
    with SglangProber(runner, torch.device("cpu"))._scratch() as slots:
        for tensor in caches:
            tensor[slots] = -1.0
    after = [*caches, runner.req_to_token_pool.req_to_token]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_cache_of_another_kind_is_refused() -> None:
    with pytest.raises(ProbeError, match="no keys and values"):
        SglangProber(runner_of(SimpleNamespace()), torch.device("cpu"))
