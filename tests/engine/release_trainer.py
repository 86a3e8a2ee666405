"""A trainer of whichever release is on the path: publishes versions, and plays turns.

argv: scheduler, folder, port, seed of the signing key, the gateway's URL. Commands come on standard
input, a line each; each is answered with a line of JSON.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import rose
from rose.client import RolloutClient, Sampling
from rose.weight_distribution import WeightPublisher
from weight_transfer import SigningKey, TensorBits

JOB = "grpo"
OUTPUT_TOKENS = 40


def tensors(version: int) -> dict[str, TensorBits]:
    bits = np.arange(4_096, dtype=np.uint16)
    bits[::7] += np.uint16(version)
    return {"w": TensorBits("w", "bfloat16", (64, 64), bits)}


async def obey(line: str, publisher: WeightPublisher, url: str) -> dict[str, Any]:
    match line.split():
        case ["start"]:
            await publisher.start()
            return {"rose": str(Path(rose.__file__).parents[1])}
        case ["publish", version]:
            new = int(version)
            await publisher.publish(new, new - 1, tensors(new - 1), tensors(new))
            return {"version": new}
        case ["turns", first, count]:
            sampling = Sampling(temperature=0.0, max_tokens=OUTPUT_TOKENS)
            async with RolloutClient(url) as client:
                asked = [
                    client.generate([1, k], sampling, request_id=f"turn-{k}")
                    for k in range(int(first), int(first) + int(count))
                ]
                turns = await asyncio.gather(*asked)
            return {"turns": [[each.token_ids, each.versions] for each in turns]}
    raise AssertionError(line)


async def main(scheduler: str, folder: str, port: str, seed: str, url: str) -> None:
    key = SigningKey.from_hex(seed)
    publisher = WeightPublisher(JOB, scheduler, Path(folder), int(port), key, 9)
    while line := await asyncio.to_thread(sys.stdin.readline):
        sys.stdout.write(json.dumps(await obey(line, publisher, url)) + "\n")
        sys.stdout.flush()
    await publisher.close()


asyncio.run(main(*sys.argv[1:]))
