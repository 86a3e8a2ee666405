"""Weights of verl's actor ranks, published as versions of ROSE.

ServerAdapter          rollout.name=rose, the trainer's own process (sync, colocate_async)
RoseCheckpointEngine   checkpoint_engine.backend=rose (separate_async)

Every rank walks all weights, since gathering them is collective; the first one publishes, and
passes each server the version of each of verl's global steps.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import ray
from verl.checkpoint_engine.base import CheckpointEngine
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout

from rose.errors import RefusedError
from rose.integrations.lora import LoraSettings
from rose.integrations.policy_publisher import PolicyPublisher
from rose.integrations.ranks import rank
from rose.integrations.settings import TrainerSettings
from rose.integrations.verl.configuration import overlaid, refuse_unfit, settings_of
from rose.integrations.verl.replica import SERVER

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

Weights = Iterable[tuple[str, "torch.Tensor"]] | AsyncIterator[tuple[str, "torch.Tensor"]]


# A job has one publisher in a process, for all callers.
_publishers: dict[str, PolicyPublisher] = {}


async def publish(
    settings: TrainerSettings,
    weights: Weights,
    step: int | None,
    *,
    wait: bool,
    lora: LoraSettings | None = None,
) -> dict[str, float]:
    """Publish the weights as the job's next version, together with all other ranks, and tell every
    RoseServer; return figures of the publication on rank 0, an empty dict on others.

    lora: they are those of a LoRA adapter, with these settings. wait: return only once the version
    is served. It runs in the caller's thread: gathering uses the device that this thread has
    chosen.
    """
    if settings.job not in _publishers:
        _publishers[settings.job] = PolicyPublisher(settings)
    publisher = _publishers[settings.job]
    named = [pair async for pair in weights] if isinstance(weights, AsyncIterator) else weights
    version = publisher.publish(named, wait=wait, lora=lora)
    if rank() != 0:
        return {}
    names = [name for name in ray.util.list_named_actors() if name.startswith(f"{SERVER}_")]
    told = [ray.get_actor(name).published.remote(version, step or 0) for name in names]
    await asyncio.gather(*told)
    receipt = publisher.receipts[-1]
    return {
        "rose/version": float(version),
        "rose/wire_bytes": float(receipt.wire_bytes),
        "rose/density": receipt.density,
        "rose/publish_s": receipt.publish_s,
        "rose/served_s": receipt.served_s,
    }


class ServerAdapter(BaseRollout):  # type: ignore[misc]  # verl's types are not read
    """Rollout side of an actor rank in verl's own trainer: it publishes weights, and has no
    engine.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_config: HFModelConfig,
        device_mesh: "DeviceMesh | None",
        replica_rank: int = -1,
        **_: object,
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = replica_rank
        refuse_unfit(config, model_config)
        self._settings = settings_of(config)

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: this process has no engine to wake."""

    async def release(self) -> None:
        """Do nothing: this process holds no engine memory."""

    async def update_weights(
        self,
        weights: Weights,
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: Mapping[str, object] | None = None,
        base_sync_done: bool = True,
        **_: object,
    ) -> None:
        """Publish the weights, or with a `peft_config` the adapter alone, as a new version, and
        return once it is served. Do nothing with an adapter's base, which replicas have.

        Raises RoseError.
        """
        if wire_format != "named_tensors":
            raise RefusedError(f"wire format {wire_format} cannot be published; send whole tensors")
        if peft_config is None:
            await publish(self._settings, weights, global_steps, wait=True)
        elif base_sync_done:
            lora = LoraSettings.of(peft_config)
            await publish(self._settings, weights, global_steps, wait=True, lora=lora)


class RoseCheckpointEngine(CheckpointEngine):  # type: ignore[misc]  # verl's types are not read
    """Checkpoint engine of verl that publishes weights as a version of ROSE; it has no receiving
    side, because nodes fetch the version.
    """

    def __init__(self, bucket_size: int = 0, is_master: bool = False, **given: object) -> None:
        """Keep `given`, settings from `checkpoint_engine.engine_kwargs.rose`; the other arguments
        are ignored.
        """
        self._given: Mapping[str, object] = given

    def prepare(self) -> dict[str, Any]:
        """Return an empty dict: ranks exchange no addresses."""
        return {}

    @classmethod
    def build_topology(
        cls, *_: object, **__: object
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return two empty dictionaries: no process group connects trainer and rollout."""
        return {}, {}

    def init_process_group(self, **_: object) -> None:
        """Do nothing: no process group is needed."""

    def finalize(self) -> None:
        """Do nothing: no resources are held."""

    async def send_weights(
        self, weights: Weights, global_steps: int | None = None
    ) -> dict[str, float]:
        """Publish the weights as a new version, and return figures of it without waiting until it
        is served; rollouts continue, and switch once they have it.
        """
        return await publish(overlaid(self._given), weights, global_steps, wait=False)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, Any]]:
        """Yield nothing: nodes fetch the weights."""
        nothing: tuple[tuple[str, torch.Tensor], ...] = ()
        for pair in nothing:
            yield pair
