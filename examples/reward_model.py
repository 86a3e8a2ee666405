"""A reward model as a job of its own: other replicas than the policy's, lent and taken back alike.

    python examples/reward_model.py run/answers.jsonl run/rewards.jsonl

Scores what examples/batch_inference.py wrote. `rewards` is what trainers call a reward function:
texts in, numbers out, on no GPU of the trainer's.

The scheduler knows the job and its model (`rose scheduler --job reward=reward-model`), and a node
has a replica whose model is `reward-model` and whose `runner` is `pooling`.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp

GATEWAY = os.environ.get("ROSE_GATEWAY", "http://127.0.0.1:7450")
JOB = "reward"
TEXTS_A_CALL, AT_ONCE = 16, 8


async def rewards(texts: Sequence[str], gateway: str = GATEWAY, job: str = JOB) -> list[float]:
    """Return the reward model's number for each text.

    A replica that is taken back meanwhile costs nothing: the gateway asks another one, and while
    there is none the call waits.
    """
    free = asyncio.Semaphore(AT_ONCE)
    async with aiohttp.ClientSession(gateway, headers={"X-Rose-Job": job}) as session:

        async def some(part: Sequence[str]) -> list[float]:
            async with free, session.post("/classify", json={"input": list(part)}) as answer:
                said = await answer.json()
                if answer.status != 200:
                    raise RuntimeError(said["error"]["message"])
                # One label: its activation is the reward.
                return [row["probs"][0] for row in said["data"]]

        parts = [texts[at : at + TEXTS_A_CALL] for at in range(0, len(texts), TEXTS_A_CALL)]
        return [reward for part in await asyncio.gather(*map(some, parts)) for reward in part]


def main() -> None:
    """Score each sample of a file, and say which reward right and wrong answers have."""
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    samples = [(row["question"], each) for row in rows for each in row["samples"]]
    found = asyncio.run(rewards([f"{question}\n{each['text']}" for question, each in samples]))
    with Path(sys.argv[2]).open("w", encoding="utf-8") as file:
        for (question, each), reward in zip(samples, found, strict=True):
            row = {"question": question, "text": each["text"], "reward": reward}
            file.write(json.dumps(row) + "\n")
    print(  # noqa: T201
        f"{len(found)} samples scored by job {JOB!r}:"
        f" rewards from {min(found):.3f} to {max(found):.3f}"
    )


if __name__ == "__main__":
    main()
