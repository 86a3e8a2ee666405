"""Parts of an update inside an engine: files, errors, plugin, probe and its proof."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numba.core.caching
import numpy as np
import pytest
import torch
from torch import nn

from weight_transfer.apply.probe import compare, insist_on_sight, probe_prompt
from weight_transfer.apply.reference import Reference, layers
from weight_transfer.apply.replica_weights import (
    Enclosed,
    ReplicaWeights,
    merged,
    names_errors,
    typed,
)
from weight_transfer.apply.staging import Staging
from weight_transfer.errors import (
    ChunkDigestError,
    ChunkMissingError,
    ProbeError,
    StoreError,
    WeightError,
    WrongBaseError,
)
from weight_transfer.kernels.simd import compiled
from weight_transfer.vllm.disable_cpu_packing import plain_linear, register, unseeded_parts

LIMIT = 64
PATIENCE_S = 5.0


@pytest.fixture
def store(tmp_path: Path) -> Path:
    store = tmp_path / "run" / "weights"
    (store / "manifests").mkdir(parents=True)
    (store / "manifests" / "1.json").write_bytes(b"sound")
    (store / "manifests" / "full").write_bytes(b"x" * LIMIT)
    (store / "manifests" / "large").write_bytes(b"x" * (LIMIT + 1))
    (tmp_path / "run" / "secret").write_bytes(b"not yours")
    os.mkfifo(store / "manifests" / "fifo")
    (store / "manifests" / "link").symlink_to(tmp_path / "run" / "secret")
    (store / "manifests" / "inner").symlink_to(store / "manifests" / "1.json")
    (store / "out").symlink_to(tmp_path / "run")
    (tmp_path / "run" / "weights-of-another").mkdir()
    (tmp_path / "run" / "weights-of-another" / "f").write_bytes(b"not yours")
    return store


def read(root: Path | None, path: Path) -> bytes:
    """In a thread: what waits for ever is to fail, not to hang."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(Enclosed(root).read, path, LIMIT).result(PATIENCE_S)
    finally:
        pool.shutdown(wait=False)


@pytest.mark.parametrize("name", ["1.json", "full"])
def test_a_file_of_the_store_is_read(
    store: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests = store / "manifests"
    expected = (manifests / name).read_bytes()
    monkeypatch.chdir(store.parent)
    for root, path in (
        (store, manifests / name),
        (None, manifests / name),
        (Path("weights"), Path("weights/manifests") / name),
        (store, manifests / ".." / "manifests" / name),
    ):
        assert read(root, path) == expected


@pytest.mark.parametrize(
    "name",
    [
        "manifests/fifo",
        "manifests/large",
        "manifests/link",
        "manifests/inner",
        "manifests",
        ".",
        "out/secret",
        "../secret",
        "manifests/../../secret",
        "../weights-of-another/f",
        "/dev/zero",
        "/etc/passwd",
        "manifests/a\0b",
        "manifests/\udcff\ud800",
        "n" * 5_000,
    ],
)
def test_nothing_else_is_read_or_waited_for(store: Path, name: str) -> None:
    with pytest.raises(StoreError):
        read(store, store / name)


@pytest.mark.parametrize("name", ["manifests/fifo", "manifests/large", "/dev/zero"])
def test_a_caller_that_may_name_any_file_names_regular_ones(store: Path, name: str) -> None:
    with pytest.raises(StoreError):
        read(None, store / name)
    with pytest.raises(ChunkMissingError, match="fetch it"):
        read(store, store / "manifests" / "2.json")


def test_an_update_that_is_still_read_does_not_hold_the_engine_up(store: Path) -> None:
    go_on = threading.Event()

    def slow() -> Any:
        go_on.wait(PATIENCE_S)
        raise StoreError("never mind")

    weights = ReplicaWeights.__new__(ReplicaWeights)
    weights._staging = Staging(slow, lambda _: iter(()))  # type: ignore[arg-type, return-value]
    with pytest.raises(StoreError, match="still being read"):
        weights.decode([store / "manifests" / "1.json"], store, "another")
    go_on.set()


@pytest.mark.parametrize("kind", [WrongBaseError, ChunkDigestError, WeightError])
def test_an_error_keeps_its_type_though_only_its_text_crosses(kind: type[WeightError]) -> None:
    @names_errors
    def method() -> None:
        raise kind("say: what\nto do")

    with pytest.raises(kind) as caught:
        method()
    across = typed(Exception(f"Call to collective_rpc method failed: {caught.value}"))
    assert type(across) is kind
    assert str(across) == "say: what\nto do"


@pytest.mark.parametrize("text", ["plain", "[rose:OSError] x", "[rose:annotations] x"])
def test_other_failures_stay_what_they_are(text: str) -> None:
    failure = RuntimeError(text)
    assert typed(failure) is failure


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


def test_a_part_of_a_prompt_draws_nothing_from_its_requests_seed() -> None:
    generators = {row: torch.Generator() for row in (0, 2)}
    batch = SimpleNamespace(num_reqs=3, generators={**generators})
    mask = SimpleNamespace(np=np.array([True, True, False, True]))
    runner = SimpleNamespace(input_batch=batch, discard_request_mask=mask)
    sample = unseeded_parts(lambda runner, more: [*runner.input_batch.generators, more])
    assert sample(runner, more=7) == [2, 7]
    assert batch.generators == generators

    def fails(runner: Any) -> None:
        raise ValueError(runner)

    with pytest.raises(ValueError, match="generators"):
        unseeded_parts(fails)(runner)
    assert batch.generators == generators


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


class Layer(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.proj = nn.Parameter(torch.randn(6, 6, dtype=torch.bfloat16))
        self.bias = nn.Parameter(torch.zeros(6, dtype=torch.bfloat16))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.proj + self.bias


class ProbedModel(nn.Module):
    """Two layers; the probe's tokens are rows of `embed`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.embed = nn.Parameter(torch.randn(300, 6, dtype=torch.bfloat16))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.layers = nn.ModuleList([Layer(0), Layer(1)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed[tokens] * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Packed(Layer):
    """Computes with a copy that it took once."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "copy"):
            self.copy = self.proj.clone()
        return hidden @ self.copy + self.bias


def proven(live: ProbedModel, reference: Callable[[], nn.Module]) -> None:
    tokens = torch.arange(7, 290, 31)
    engine: Any = SimpleNamespace(
        model=live, prober=SimpleNamespace(logits=lambda model: model(tokens).clone())
    )
    weights = dict(live.named_parameters())
    loader_map: Any = SimpleNamespace(filled=tuple(weights), parameter=weights.__getitem__)

    def pieces() -> Iterator[None]:
        yield
        return Reference(engine.prober.logits(reference()), {})  # type: ignore[return-value]

    with torch.inference_mode():
        insist_on_sight(engine, loader_map, pieces)  # type: ignore[arg-type]


def test_a_proof_that_sees_every_weight_leaves_them_as_they_were() -> None:
    live, fresh = ProbedModel(), ProbedModel()
    proven(live, lambda: fresh)
    for name, weight in live.named_parameters():
        assert torch.equal(weight, dict(fresh.named_parameters())[name]), name


def test_a_packed_copy_and_a_borrowed_layer_are_named() -> None:
    live, borrowing = ProbedModel(), ProbedModel()
    borrowing.layers[0] = live.layers[0]
    with pytest.raises(ProbeError, match="a fresh load of the base does not compute"):
        proven(live, lambda: borrowing)
    live.layers[0] = Packed(0)
    with pytest.raises(ProbeError, match=r"does not compute with layers\.0\.proj"):
        proven(live, ProbedModel)


def test_a_kernel_without_a_folder_to_keep_it_in_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])

    @compiled
    def twice(number: np.int64) -> int:
        return 2 * number

    assert twice(21) == 42
