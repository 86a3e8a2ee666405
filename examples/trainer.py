"""A trainer: it gets turns from the gateway, and publishes a new policy version after each step.

python examples/trainer.py models/policy
"""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from rose.client import RolloutClient, Sampling
from rose.weight_distribution import WeightPublisher
from weight_transfer import SigningKey, TensorBits, read_model_dir

Weights = dict[str, TensorBits]


def optimizer_step(weights: Weights) -> Weights:
    """Return new weights. Yours come from training; `weight_transfer.bits_of` wraps a tensor."""
    name = min(weights)
    bits = weights[name].bits.copy()
    bits[:100] ^= 1
    return weights | {name: replace(weights[name], bits=bits)}


async def train(model: Path, steps: int = 3) -> None:
    """Roll out, train, publish. Version 0 is the model that every replica started from."""
    weights = read_model_dir(model)
    key = SigningKey.load(Path("run/trainer.key"))
    publisher = WeightPublisher("job", "127.0.0.1:7400", Path("run/published"), 7500, key)
    async with RolloutClient("http://127.0.0.1:8000", timeout_s=600) as client, publisher:
        for version in range(steps):
            sampling = Sampling(max_tokens=8, seed=version)
            turn = await client.generate([1, 2, 3], sampling, min_version=version)
            print(turn.token_ids, turn.logprobs, turn.versions, turn.segments)  # noqa: T201
            old, weights = weights, optimizer_step(weights)
            receipt = await publisher.publish(version + 1, version, old, weights)
            print(f"version {receipt.version}: {receipt.wire_bytes} bytes")  # noqa: T201


if __name__ == "__main__":
    asyncio.run(train(Path(sys.argv[1])))
