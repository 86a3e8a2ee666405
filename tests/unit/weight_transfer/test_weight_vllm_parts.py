import os

import pytest
import torch
from torch import nn

from weight_transfer.apply.probe import compare, probe_prompt
from weight_transfer.apply.reference import layers
from weight_transfer.apply.worker import merged
from weight_transfer.vllm.disable_cpu_packing import plain_linear, register


def test_the_plugin_is_inert_in_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm.model_executor.layers", None)
    for role in ("host", None):
        monkeypatch.delenv("ROSE_ROLE", raising=False)
        if role:
            monkeypatch.setenv("ROSE_ROLE", role)
        register()
    assert os.environ.get("ROSE_ROLE") is None


def test_plain_linear_computes_with_the_live_weight() -> None:
    layer = nn.Linear(4, 3, bias=False)
    plain_linear(layer, remove_weight=True)
    with torch.no_grad():
        layer.weight.fill_(2.0)
        assert layer.cpu_linear(torch.ones(1, 4), layer.weight, None).tolist() == [[8.0] * 3]


def test_logits_are_compared_by_bits() -> None:
    logits = torch.tensor([[0.0, 1.0]])
    assert compare(logits, logits.clone()).ok
    signed = compare(logits, torch.tensor([[-0.0, 1.0]]))
    assert (signed.ok, signed.max_abs_diff) == (False, 0.0)
    assert compare(logits, torch.tensor([[0.0, 1.5]])).max_abs_diff == 0.5
    assert compare(logits, torch.tensor([[0.0, float("nan")]])).max_abs_diff > 1e300


def test_the_probe_prompt_stays_inside_the_vocabulary() -> None:
    for size in (5, 96, 150_000):
        assert all(0 <= token < size for token in probe_prompt(size))
    assert len(set(probe_prompt(96))) == 24


def test_a_layer_is_loaded_in_one_go() -> None:
    names = ["head", "m.layers.0.q", "m.layers.0.experts.3.w", "m.layers.1.q", "norm"]
    assert layers(names) == [["head", "norm"], names[1:3], names[3:4]]


def test_one_ranks_failed_proof_is_everybodys() -> None:
    good = {"version": 3, "apply_s": 0.1, "probe_s": 0.3, "probe_max_abs_diff": 0.0}
    good |= {"digest_ok": True, "probe_ok": True}
    bad = good | {"probe_ok": False, "apply_s": 0.2, "probe_max_abs_diff": 2.0}
    whole = merged([good, bad])
    assert (whole["digest_ok"], whole["probe_ok"]) == (True, False)
    assert (whole["apply_s"], whole["probe_s"], whole["probe_max_abs_diff"]) == (0.2, 0.3, 2.0)
