"""A trainer: it gets turns from the gateway, and publishes a new policy version after each step.

python examples/trainer.py

Started again it goes on from the version that it published last.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

from rose.client import RolloutClient, Sampling
from rose.weight_distribution import PublisherSettings, WeightPublisher
from weight_transfer import SigningKey, TensorBits, read_model_dir

Weights = dict[str, TensorBits]


def optimizer_step(weights: Weights) -> Weights:
    """Return new weights. Yours come from training; `weight_transfer.bits_of` wraps a tensor."""
    name = min(weights)
    bits = weights[name].bits.copy()
    bits[:100] ^= 1
    return weights | {name: replace(weights[name], bits=bits)}


async def begin(publisher: WeightPublisher, model: Weights) -> tuple[int, Weights]:
    """Return the version to go on from, and its weights."""
    begun = publisher.begun
    if begun.resumed is not None:  # this run's own, from its root
        return begun.resumed, dict(await publisher.restore())
    if begun.latest:  # another run's: replicas come from those weights to these
        await publisher.publish_anew(begun.latest + 1, model)
        return begun.latest + 1, model
    return 0, model  # the model that every replica started from


async def train(model: Path, steps: int = 3) -> None:
    """Roll out, train, publish."""
    weights = read_model_dir(model)
    key = SigningKey.load(Path("run/trainer.key"))
    root = Path("run/published")
    settings = PublisherSettings(checkpoint=model)
    publisher = WeightPublisher("job", "127.0.0.1:7400", root, 7500, key, settings=settings)
    async with RolloutClient("http://127.0.0.1:7450", timeout_s=600) as client, publisher:
        first, weights = await begin(publisher, weights)
        for version in range(first, first + steps):
            sampling = Sampling(max_tokens=8, seed=version)
            turn = await client.generate([1, 2, 3], sampling, min_version=version)
            print(turn.token_ids, turn.logprobs, turn.versions, turn.segments)  # noqa: T201
            old, weights = weights, optimizer_step(weights)
            receipt = await publisher.publish(version + 1, version, old, weights)
            print(f"version {receipt.version}: {receipt.wire_bytes} bytes")  # noqa: T201


if __name__ == "__main__":
    asyncio.run(train(Path("models/policy")))
