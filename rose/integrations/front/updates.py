"""Updates from checkpoint folders: one after the other, each served before the next is begun.

    asked ── in turn? ── whole? ── read, published, served ──► its version is in force
      │ too many wait    │ not within `whole_s`     │ does not fit, not served
      └──────────────────┴──────────────────────────┴────────► refused; the version before stays

Asked again for what is in force (a client that gave up waiting asks again), it is no new version.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rose.errors import UnavailableError
from rose.integrations.front.checkpoint_folder import (
    NotWholeError,
    SavedCheckpoint,
    WeightRoots,
    look,
    named_tensors,
)
from rose.integrations.named_weights import Named

LOOK_S = 0.2
MOST_WAITING = 8
# SGLang's name of the weights that an engine started with.
START_LABEL = "default"


class VersionPublisher(Protocol):
    """What publishes; `PolicyPublisher` does."""

    @property
    def version(self) -> int:
        """That was published last, 0 before the first."""

    def publish(self, named: Named, *, wait: bool = True) -> int:
        """Publish and return the version, once it is served."""

    def wait_served(self, version: int, replicas: int | None = None) -> None:
        """Return once it is served."""


@dataclass(frozen=True, slots=True)
class InForce:
    """What was published last. label: the trainer's own name of it."""

    version: int
    label: str
    saved: SavedCheckpoint | None = None


class CheckpointUpdates:
    """Publishes checkpoint folders in the order in which they are asked for.

    whole_s: how long a folder that is still written is waited for; marker: file that says it is
    whole, where the trainer makes one.
    """

    def __init__(
        self,
        publisher: VersionPublisher,
        roots: WeightRoots,
        *,
        marker: str | None = None,
        whole_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._publisher = publisher
        self._roots = roots
        self._marker = marker
        self._whole_s = whole_s
        self._clock = clock
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[InForce]] = set()
        version = publisher.version
        self.in_force = InForce(version, str(version) if version else START_LABEL)

    async def update(self, path: str, label: str | None = None) -> InForce:
        """Publish a folder; returns once it is served. Raises RoseError with one line.

        A caller that hangs up stops nothing: half an update would leave nobody knowing.
        """
        folder = self._roots.folder(path)
        if len(self._tasks) >= MOST_WAITING:
            raise UnavailableError(f"{len(self._tasks)} updates wait already; ask again later")
        task = asyncio.ensure_future(self._in_turn(folder, label))
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Wait for what is being published, which has bounds of its own."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: "asyncio.Task[InForce]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Told to the caller, if it is still there.
            task.exception()

    async def _in_turn(self, folder: Path, label: str | None) -> InForce:
        async with self._turn:
            saved = await self._whole(folder)
            last = self.in_force
            if saved == last.saved:
                await asyncio.to_thread(self._publisher.wait_served, last.version)
                version = last.version
            else:
                version = await self._published(saved, label)
            self.in_force = InForce(version, label or str(version), saved)
            return self.in_force

    async def _published(self, saved: SavedCheckpoint, label: str | None) -> int:
        named = named_tensors(saved, self._roots)
        version = await asyncio.to_thread(self._publisher.publish, named, wait=False)
        # Announced: whatever becomes of the waiting, this is the version that is in force.
        self.in_force = InForce(version, label or str(version), saved)
        await asyncio.to_thread(self._publisher.wait_served, version)
        return version

    async def _whole(self, folder: Path) -> SavedCheckpoint:
        until_s = self._clock() + self._whole_s
        while True:
            try:
                return await asyncio.to_thread(look, folder, self._roots, self._marker)
            except NotWholeError as error:
                if self._clock() >= until_s:
                    raise NotWholeError(
                        f"{error}, after {self._whole_s:g} s; save it whole before it is named"
                    ) from None
            await asyncio.sleep(LOOK_S)
