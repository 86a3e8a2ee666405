"""Events of the guest: a weight update, a kill and a start, each in a window of its own."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np

from bench.coserve.engines import Engines
from bench.coserve.plan import GUEST
from bench.coserve.player import Drill
from rose.errors import RefusedError, UnavailableError
from rose.logs.eventlog import JsonlLog
from rose.node.replica_client import ReplicaClient
from weight_transfer import ChunkStore, SigningKey, TensorBits, VersionPublisher, read_model_dir

# Events happen after this share of their window: before it the guest runs as usual.
WHEN = 1 / 3
# A step of training changes this share of the weights, by one unit in the last place.
CHANGED_SHARE = 0.05


@dataclass(slots=True)
class CoserveDrills:
    """Drills of the event arms; `events.jsonl` gets their outcome."""

    engines: Engines
    session: aiohttp.ClientSession
    store: Path
    log: JsonlLog
    event_s: float

    def of(self, name: str) -> Drill | None:
        """Return the drill of an arm, None for the arm without an event."""
        drills: dict[str, Drill] = {
            "weight_apply": self.apply,
            "guest_kill": self.kill,
            "guest_start": self.start,
        }
        return drills.get(name)

    def publish(self, key: SigningKey, model: Path, seed: int) -> None:
        """Make version 1, which every life of the guest can apply to the model it started from."""
        base = read_model_dir(model)
        rng = np.random.default_rng(seed)
        publisher = VersionPublisher(ChunkStore(self.store), "bench", "rose-bench", key)
        publisher.publish(1, 0, base, {name: _stepped(t, rng) for name, t in base.items()})

    async def apply(self, block: int) -> None:
        """Apply version 1."""
        await asyncio.sleep(WHEN * self.event_s)
        began_s = time.monotonic()
        store = ChunkStore(self.store)
        client = ReplicaClient(
            self.session, self.engines.url(GUEST), lambda: self.engines.headers(GUEST)
        )
        try:
            applied = await client.apply([store.manifest_path(1)], store.chunks_dir)
        except (RefusedError, UnavailableError) as error:
            self._write("weight_apply", block, began_s, ok=False, message=str(error))
            return
        self._write(
            "weight_apply",
            block,
            began_s,
            ok=applied.ok,
            pause_s=applied.pause_s,
            apply_s=applied.apply_s,
            changed=applied.changed_elements,
            wire_bytes=applied.wire_bytes,
        )

    async def kill(self, block: int) -> None:
        """Kill the guest."""
        await asyncio.sleep(WHEN * self.event_s)
        began_s = time.monotonic()
        await self.engines.kill_guest()
        self._write("guest_kill", block, began_s, ok=True)

    async def start(self, block: int) -> None:
        """Start the guest; the window covers as much of the start as fits."""
        began_s = time.monotonic()
        await self.engines.begin_guest()
        await self.engines.await_guest()
        self._write("guest_start", block, began_s, ok=True, window_s=self.event_s)

    def _write(self, event: str, block: int, began_s: float, *, ok: bool, **detail: object) -> None:
        now_s = time.monotonic()
        self.log.write(
            {
                "t_s": began_s,
                "source": "bench",
                "event": event,
                "block": block,
                "took_s": now_s - began_s,
                "ok": ok,
                "detail": detail,
            }
        )


def _stepped(tensor: TensorBits, rng: np.random.Generator) -> TensorBits:
    moved = rng.random(tensor.bits.size) < CHANGED_SHARE
    bits = np.where(moved, tensor.bits ^ tensor.bits.dtype.type(1), tensor.bits)
    return TensorBits(tensor.name, tensor.dtype, tensor.shape, bits.astype(tensor.bits.dtype))
