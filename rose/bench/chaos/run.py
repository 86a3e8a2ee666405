"""One chaos run: a fleet, its faults, a trainer, and what was found."""

import asyncio
import sys
import time
from dataclasses import asdict
from pathlib import Path

from rose.bench.chaos.faults import Faults
from rose.bench.chaos.fleet import Fleet
from rose.bench.chaos.trainer import Trainer, undisturbed
from rose.client import Retry, RolloutClient

# A turn waits out the start of a gateway, and of an engine where it is the last one.
PATIENT = Retry(tries=60, first_s=0.05, max_s=1.0)
TURN_S = 240.0


async def chaos(fleet: Fleet, seconds: float, in_flight: int, seed: int) -> dict[str, object]:
    """Disturb a fleet that is up for so long, with so many turns in flight all the time."""
    async with RolloutClient(fleet.urls, TURN_S, retry=PATIENT) as client:
        expected = await undisturbed(client)
        trainer, faults = Trainer(client, expected, seed), Faults(fleet, seed)
        until_s = time.monotonic() + seconds
        said = asyncio.create_task(_tell(trainer, faults))
        try:
            await asyncio.gather(faults.run(until_s), trainer.run(in_flight, until_s))
        finally:
            said.cancel()
            await faults.cancel()
        progress = client.progress()
    found = asdict(trainer.findings)
    found.pop("_ids")
    return {
        "seconds": seconds,
        "in_flight": in_flight,
        "seed": seed,
        "faults_done": dict(faults.counts),
        "client_tries_repeated": progress.repeated_tries,
        "faults_found": trainer.findings.faults,
        **found,
    }


async def _tell(trainer: Trainer, faults: Faults) -> None:
    while True:
        await asyncio.sleep(10)
        found = trainer.findings
        sys.stderr.write(
            f"chaos: {found.delivered} of {found.asked} turns, {found.moved} moved,"
            f" {found.faults} faults; {dict(faults.counts)}\n"
        )


async def start_and_run(
    folder: Path, seconds: float, in_flight: int, seed: int, replicas: int
) -> dict[str, object]:
    """With a fleet of its own; `folder` has its model in `model`."""
    async with Fleet(folder, folder / "model", replicas) as fleet:
        return await chaos(fleet, seconds, in_flight, seed)
