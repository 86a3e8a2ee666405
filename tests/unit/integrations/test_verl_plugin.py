"""The plugin in verl's registries, and what its classes do when verl calls them."""

import importlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from rose.errors import ConfigError, RefusedError
from rose.integrations import PolicyReceipt, TrainerSettings
from rose.integrations.lora import LoraSettings
from tests.fakes import verl_package
from tests.fakes.verl_package import StandInRay
from tests.harness.policies import trainer_environment
from weight_transfer import SigningKey

PLUGIN = "rose.integrations.verl.plugin"
RECEIPT = PolicyReceipt(7, 10, 20, 0.5, 0.1, 0.2)


class StandInPolicyPublisher:
    """Remembers what it is asked to publish."""

    made: list["StandInPolicyPublisher"]

    def __init__(self, settings: TrainerSettings) -> None:
        self.settings = settings
        self.published: list[tuple[list[str], bool]] = []
        self.adapters: list[LoraSettings | None] = []
        self.receipts = [RECEIPT]
        self.made.append(self)

    def publish(self, named: Any, *, wait: bool, lora: LoraSettings | None = None) -> int:
        self.published.append(([name for name, _ in named], wait))
        self.adapters.append(lora)
        return RECEIPT.version


@pytest.fixture
def verl() -> Iterator[tuple[StandInRay, SimpleNamespace]]:
    with verl_package.installed() as (ray, registries):
        importlib.import_module(PLUGIN)
        yield ray, registries


@pytest.fixture
def publishers(verl: object, monkeypatch: pytest.MonkeyPatch) -> list[StandInPolicyPublisher]:
    del verl  # its modules are there
    StandInPolicyPublisher.made = []
    weights = importlib.import_module("rose.integrations.verl.weights")
    monkeypatch.setattr(weights, "PolicyPublisher", StandInPolicyPublisher)
    return StandInPolicyPublisher.made


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    SigningKey.generate().save(tmp_path / "key")
    named = trainer_environment(tmp_path).items()
    return {name.removeprefix("ROSE_").lower(): value for name, value in named} | {
        "max_staleness": 3
    }


def rollout(given: dict[str, Any]) -> SimpleNamespace:
    lengths = {"prompt_length": 8, "response_length": 8, "max_model_len": None}
    return SimpleNamespace(engine_kwargs={"rose": given}, **lengths)


WHOLE = SimpleNamespace(lora_rank=0, lora={}, lora_adapter_path=None)


def test_the_plugin_is_in_all_three_registries(verl: Any) -> None:
    _, registries = verl
    assert registries.rollouts["rose", "async"] == "rose.integrations.verl.weights.ServerAdapter"
    assert registries.engines["rose"].__name__ == "RoseCheckpointEngine"
    with patch("rose.integrations.tested.version", return_value="0.9.1"):
        assert registries.replicas["rose"]().__name__ == "RoseReplica"


@pytest.mark.parametrize("found", ["0.12.0", PackageNotFoundError()])
def test_an_untested_release_is_refused_where_rose_is_asked_for(verl: Any, found: Any) -> None:
    _, registries = verl
    with (
        patch("rose.integrations.tested.version", side_effect=[found]),
        pytest.raises(ConfigError, match="verl"),
    ):
        registries.replicas["rose"]()


@pytest.mark.parametrize(("mode", "lag"), [("hybrid", 0), ("standalone", 3)])
async def test_a_replica_is_an_actor_without_resources(
    verl: Any, given: dict[str, Any], mode: str, lag: int
) -> None:
    ray, _ = verl
    replica = importlib.import_module("rose.integrations.verl.replica")
    mine = replica.RoseReplica(1, rollout(given), WHOLE)
    if mode == "standalone":
        await mine.init_standalone()
        assert len(mine.workers) == 1
    else:
        mine.rollout_mode = mode
        await mine.launch_servers()
    assert {each["num_cpus"] for each in ray.options} == {0}
    assert mine.servers == [ray.named["rose_server_1"]]
    server = mine.servers[0].actor
    assert server._turns._steps.lag == lag
    assert await mine.servers[0].abort_all_requests.remote(reject_request=True) == {
        "aborted_count": 0
    }
    await mine.servers[0].clear_kv_cache.remote()


async def test_what_is_not_carried_is_refused_before_an_actor_starts(
    verl: Any, given: dict[str, Any]
) -> None:
    ray, _ = verl
    replica = importlib.import_module("rose.integrations.verl.replica")
    asked = rollout(given)
    asked.quantization = "fp8"
    with pytest.raises(RefusedError, match="quantization"):
        await replica.RoseReplica(0, asked, WHOLE).launch_servers()
    mine = replica.RoseReplica(0, rollout(given), WHOLE)
    mine.is_reward_model = True
    with pytest.raises(RefusedError, match="reward model"):
        await mine.launch_servers()
    assert not ray.named


async def test_a_sync_update_is_served_before_it_returns_and_every_server_knows_its_step(
    verl: Any, given: dict[str, Any], publishers: list[StandInPolicyPublisher]
) -> None:
    ray, _ = verl
    replica = importlib.import_module("rose.integrations.verl.replica")
    for number in range(2):
        await replica.RoseReplica(number, rollout(given), WHOLE).launch_servers()
    weights = importlib.import_module("rose.integrations.verl.weights")
    adapter = weights.ServerAdapter(rollout(given), WHOLE, None)
    await adapter.update_weights(iter([("a", 1), ("b", 2)]), global_steps=4, base_sync_done=True)
    [publisher] = publishers
    assert publisher.settings.max_staleness == 3
    assert publisher.published == [(["a", "b"], True)]
    for handle in ray.named.values():
        assert handle.actor._turns._steps.step_of(RECEIPT.version) == 4
    with pytest.raises(RefusedError, match="wire format"):
        await adapter.update_weights(iter([]), wire_format="bytes")


async def test_of_an_unmerged_adapter_the_adapter_alone_is_published(
    verl: Any, given: dict[str, Any], publishers: list[StandInPolicyPublisher]
) -> None:
    """verl sends the base once, in the first step, and the adapter in each."""
    del verl
    weights = importlib.import_module("rose.integrations.verl.weights")
    model = SimpleNamespace(lora_rank=8, lora={"merge": False})
    mine = weights.ServerAdapter(rollout(given), model, None)
    peft = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none"}
    for done in (False, True):
        named = iter([("lora_A" if done else "base_layer", 1)])
        await mine.update_weights(named, peft_config=peft, base_sync_done=done)
    [publisher] = publishers
    assert publisher.published == [(["lora_A"], True)]
    assert publisher.adapters == [LoraSettings(8, 16.0)]
    with pytest.raises(RefusedError, match="use_dora"):
        await mine.update_weights(iter([]), peft_config=peft | {"use_dora": True})


async def test_an_async_update_does_not_wait_and_says_what_it_cost(
    verl: Any, given: dict[str, Any], publishers: list[StandInPolicyPublisher]
) -> None:
    _, registries = verl
    engine = registries.engines["rose"](bucket_size=1, is_master=True, **given)

    async def weights() -> Any:
        yield "a", 1

    figures = await engine.send_weights(weights(), global_steps=2)
    assert publishers[0].published == [(["a"], False)]
    assert figures["rose/version"] == 7.0
    assert engine.prepare() == {}
    assert engine.build_topology(1, 1, []) == ({}, {})
    assert [pair async for pair in engine.receive_weights()] == []
