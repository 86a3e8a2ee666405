"""The chaos benchmark's fleet over engines of the pool: they run before it and go on after it."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
from pool import Started

from bench.chaos import ChaosFleet, ChaosReplica


@asynccontextmanager
async def fleet_of(
    engines: Sequence[Started], folder: Path, **fields: Any
) -> AsyncIterator[ChaosFleet]:
    """`fields`: of the fleet."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
        replicas = [
            ChaosReplica(engine.spec, http, engine.running, epoch=next(engine.epochs), up=True)
            for engine in engines
        ]
        try:
            model = engines[0].spec.model_dir
            async with ChaosFleet(
                folder, model, len(replicas), replicas=replicas, **fields
            ) as fleet:
                yield fleet
        finally:
            for engine, replica in zip(engines, replicas, strict=True):
                engine.epochs = count(replica.epoch + 1)
