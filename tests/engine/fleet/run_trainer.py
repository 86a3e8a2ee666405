"""A trainer that may be killed at any moment, and goes on from its root when it is started again.

argv: JSON of what it is given. Commands come on standard input, a line each; each is answered with
a line of JSON. With `dies_before` it is gone when that version is durable and nobody was told.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from rose.errors import RoseError
from rose.weight_distribution import PublisherSettings, WeightPublisher
from rose.weight_distribution import weight_publisher as publisher
from tests.engine.fleet.little_cluster import JOB, tensors
from weight_transfer import SigningKey


class MortalPublisher(WeightPublisher):
    """Ends as `kill -9` ends it, between a version's last file and its announcement."""

    dies_before: int | None = None

    async def _announce(self, version: int, parent: int) -> None:
        if version == self.dies_before:
            os.kill(os.getpid(), signal.SIGKILL)
        await super()._announce(version, parent)


class Trainer:
    """Weights of version v are `tensors(v)`, whichever run made it."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.publisher = MortalPublisher(
            JOB,
            given["scheduler"],
            Path(given["root"]),
            given["port"],
            SigningKey.from_hex(given["seed"]),
            9,
            PublisherSettings(run=given["name"], take_over=given.get("take_over", False)),
        )
        self.publisher.dies_before = given.get("dies_before")
        self.version = 0

    async def begin(self) -> dict[str, Any]:
        begun = await self.publisher.start()
        if begun.resumed is None:
            self.version = begun.latest + 1
            await self.publisher.publish_anew(self.version, tensors(self.version))
            return {"anew": self.version}
        weights = await self.publisher.restore()
        self.version = begun.resumed
        same = (weights["w"].bits == tensors(self.version)["w"].bits).all()
        return {"resumed": self.version, "bit_for_bit": bool(same)}

    async def step(self) -> dict[str, Any]:
        old, new = self.version, self.version + 1
        await self.publisher.publish(new, old, tensors(old), tensors(new))
        self.version = new
        return {"version": new}


async def main(given: dict[str, Any]) -> None:
    # A second trainer is to be refused within the test's patience.
    publisher.WAIT_S = given.get("wait_s", publisher.WAIT_S)
    trainer = Trainer(given)
    commands = {"begin": trainer.begin, "step": trainer.step}
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        try:
            answer = await commands[line]()
        except RoseError as error:
            answer = {"error": type(error).__name__, "line": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    await trainer.publisher.close()


asyncio.run(main(json.loads(sys.argv[1])))
