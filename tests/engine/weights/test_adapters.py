"""Real vLLM: adapters come into slots of their own, proven, and compute what a stock load does."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_starts import EngineStarts
from test_weight_apply import ServedEngine, served_model
from tiny_model import VOCABULARY

from tests.harness.adapters import adapter_of, moved, settings_of, write_adapter
from weight_transfer import AdapterError, TensorBits, WrongBaseError
from weight_transfer.apply.replica_weights import typed

pytestmark = [
    pytest.mark.engine,
    pytest.mark.starts_others,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]
PROMPT = [(5 * k) % VOCABULARY for k in range(40)]


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, engine_starts: EngineStarts
) -> Iterator[ServedEngine]:
    engine_starts.note()
    with served_model(
        tmp_path_factory.mktemp("adapters"),
        distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
        enable_lora=True,
        max_loras=3,
        max_lora_rank=8,
    ) as served:
        served.publisher.adapter = settings_of(served.base)
        yield served


def greedy(served: ServedEngine, lora: Any = None, tokens: int = 24) -> list[int]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    (output,) = served.llm.generate(
        [{"prompt_token_ids": PROMPT}], sampling, lora_request=lora, use_tqdm=False
    )
    return list(output.outputs[0].token_ids)


def slot(attempt: int) -> Any:
    from vllm.lora.request import LoRARequest

    from weight_transfer.vllm.adapters import adapter_number

    return LoRARequest(str(attempt), adapter_number(str(attempt)), "-")


def load(served: ServedEngine, version: int, *, base: bool = False) -> dict[str, Any]:
    return served.load([str(served.store.manifest_path(version, base=base))])


def stock(served: ServedEngine, folder: Path, number: int, tensors: dict[str, TensorBits]) -> Any:
    """Return what vLLM's own load of the adapter from disk generates."""
    from vllm.lora.request import LoRARequest

    write_adapter(folder, tensors)
    found = greedy(served, LoRARequest(folder.name, number, str(folder)))
    served.llm.llm_engine.remove_lora(number)
    return found


def damage(worker: Any) -> None:
    """Change one weight of the slot of the adapter that was loaded last."""
    weights = worker.rose_weights
    part = weights._slots.parts(weights._coming.number)
    name = next(name for name in part if name.endswith("down_proj.lora_B.0"))
    part[name].view(-1)[3] += 1.0


def held(worker: Any) -> dict[str, bytes]:
    return {n: t.bits.tobytes() for n, t in worker.rose_weights.adapter_tensors("test").items()}


def test_versions_compute_what_a_stock_load_of_their_files_does(
    served: ServedEngine, tmp_path: Path
) -> None:
    plain = greedy(served)
    first = adapter_of(served.base, seed=1)
    served.publisher.publish_base(1, first)
    loaded = load(served, 1, base=True)
    report = served.rpc("rose_weights_commit")
    assert (report["version"], report["digest_ok"], report["probe_ok"]) == (1, True, True)
    one = slot(served.attempts)
    second = moved(first, seed=2)
    manifest = served.publisher.publish(2, 1, first, second)
    assert manifest.changed < sum(t.bits.size for t in second.values()) / 5
    assert manifest.wire_bytes < loaded["wire_bytes"] / 2
    load(served, 2)
    assert served.rpc("rose_weights_commit")["probe_ok"]
    assert served.run(held) == {n: t.bits.tobytes() for n, t in second.items()}
    two = slot(served.attempts)
    answers = {"base": greedy(served), "one": greedy(served, one), "two": greedy(served, two)}
    again = {"base": greedy(served), "one": greedy(served, one), "two": greedy(served, two)}
    assert again == answers, "cached prefixes are kept apart"
    assert answers["base"] == plain
    assert len({tuple(tokens) for tokens in answers.values()}) == 3
    served.rpc("rose_adapters_drop", [one.lora_name])
    assert stock(served, tmp_path / "first", 71, first) == answers["one"]
    assert stock(served, tmp_path / "second", 72, second) == answers["two"]
    served.version, served.active = 2, second
    served.rpc("rose_adapters_drop", [two.lora_name])


def test_a_slot_that_differs_from_a_stock_load_is_noticed(served: ServedEngine) -> None:
    new = moved(served.active, seed=3)
    served.publisher.publish(3, 2, served.active, new)
    load(served, 3)
    served.run(damage)
    report = served.rpc("rose_weights_commit")
    assert (report["version"], report["digest_ok"], report["probe_ok"]) == (2, False, False)
    load(served, 3)
    assert served.rpc("rose_weights_commit")["version"] == 3, "the next try goes through"
    served.rpc("rose_adapters_drop", [str(served.attempts)])
    served.version, served.active = 3, new


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("base", "adapter.base is 0000"),
        ("rank", "r is 16, and this replica's lora.max_rank 8"),
        ("module", "target_modules: the base has no linear layer model.layers.9.mlp.down_proj"),
        ("shape", "lora_B is (7, 8), and r=8 and the base make it (128, 8)"),
        ("whole", "version 9 is whole weights, and this replica's `lora` keeps its base"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(served: ServedEngine, case: str, line: str) -> None:
    settings = settings_of(served.base)
    tensors = adapter_of(served.base, seed=4, targets=("down_proj",))
    name = next(name for name in tensors if name.endswith("0.mlp.down_proj.lora_B.weight"))
    if case == "base":
        settings = settings_of({})
        settings = type(settings)("0" * 64, settings.r, settings.lora_alpha)
    elif case == "rank":
        settings, tensors = settings_of(served.base, 16), adapter_of(served.base, seed=4, r=16)
    elif case == "module":
        tensors = {n.replace("layers.0", "layers.9"): t for n, t in tensors.items()}
        tensors = {n: replace(t, name=n) for n, t in tensors.items()}
    elif case == "shape":
        tensors[name] = replace(tensors[name], shape=(7, 8), bits=tensors[name].bits[:56])
    served.publisher.adapter = None if case == "whole" else settings
    try:
        served.publisher.publish_base(9, served.base if case == "whole" else tensors)
        with pytest.raises(Exception, match="rose:") as refused:
            load(served, 9, base=True)
        error = typed(refused.value)
        assert type(error) is AdapterError
        assert line in str(error)
        assert "\n" not in str(error)
    finally:
        served.store.manifest_path(9, base=True).unlink()
        served.publisher.adapter = settings_of(served.base)


def test_an_older_version_or_another_chain_is_not_taken(served: ServedEngine) -> None:
    with pytest.raises(Exception, match="rose:") as refused:
        load(served, 1, base=True)
    assert isinstance(typed(refused.value), WrongBaseError)
