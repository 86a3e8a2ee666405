"""Updates from checkpoint folders: one after the other, each served before the next begins.

    asked ── in turn? ── whole? ── read, published, served ──► its version is in force
      │ too many wait    │ not within `whole_s`     │ does not fit
      └──────────────────┴──────────────────────────┴────────► refused; the version before stays

A version that is published and not announced or served in time is in force too, and its caller gets
an error.

A repeated request for the version in force (a client that timed out repeats it) makes no new one.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rose.errors import NotAnnouncedError, RefusedError, UnavailableError
from rose.integrations.front.checkpoint_folder import (
    NotWholeError,
    SavedCheckpoint,
    WeightRoots,
    look,
    named_tensors,
)
from rose.integrations.front.pulled_weights import PulledWeights
from rose.integrations.named_weights import Named

T = TypeVar("T")
LOOK_S = 0.2
MOST_WAITING = 8
# SGLang's name of the weights that an engine started with.
START_LABEL = "default"


class FrontPublisher(Protocol):
    """Protocol of a blocking publisher of versions, such as `PolicyPublisher`."""

    @property
    def version(self) -> int:
        """Number of the newest published version, 0 before the first."""

    def publish(self, named: Named, *, wait: bool = True) -> int:
        """Publish named tensors as a version and return its number; with `wait` only when replicas
        serve it.
        """

    def wait_served(self, version: int, replicas: int | None = None) -> None:
        """Announce the version if no scheduler knows it, and block until this many replicas
        (default: the settings') serve it or a newer one.

        Raises RoseError if that takes too long.
        """


@dataclass(frozen=True, slots=True)
class InForce:
    """Newest published version.

    label: the trainer's own name of it. saved: checkpoint or pull that it was made of, None at the
    start.
    """

    version: int
    label: str
    saved: "SavedCheckpoint | Pulled | None" = None


@dataclass(frozen=True, slots=True)
class Pulled:
    """Identity of pulled weights.

    name: the folder into which an engine would have pulled them. number: count of pulls, since a
    new stream repeats version numbers.
    """

    name: str
    number: int


class CheckpointUpdates:
    """Publisher of checkpoint folders, one at a time, in the order of their requests.

    base: checkpoint on which streams of changes build. whole_s: seconds to wait for a folder that
    is still being written. marker: name of the file that says it is whole, if the trainer makes
    one.
    """

    def __init__(
        self,
        publisher: FrontPublisher,
        roots: WeightRoots,
        *,
        base: Path | None = None,
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
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pulling = PulledWeights(roots, base) if base else None
        self._pulled: Pulled | None = None
        self._pulled_into: str | None = None
        self._pulls = 0
        version = publisher.version
        self.in_force = InForce(version, str(version) if version else START_LABEL)

    async def update(self, path: str, label: str | None = None) -> InForce:
        """Publish a checkpoint folder, or the weights that `pull` built under this name; return
        when replicas serve the version.

        The version in force is not published again for the same files. An update continues if its
        caller hangs up: half an update would leave an unknown state. Raises RoseError with one
        line, and UnavailableError if eight updates wait already.
        """
        if path == self._pulled_into:
            return await self._shielded(self._in_turn_pulled(label))
        folder = self._roots.folder(path)
        return await self._shielded(self._in_turn(folder, label))

    async def pull(self, name: str, source: str, version: int) -> None:
        """Build `version` of a stream of changes from the folder `source`; `update(name)` publishes
        it.

        Raises RoseError.
        """
        folder = self._roots.folder(source)
        await self._shielded(self._in_turn_pull(name, folder, version))

    async def _shielded(self, work: Coroutine[Any, Any, T]) -> T:
        if len(self._tasks) >= MOST_WAITING:
            work.close()
            raise UnavailableError(f"{len(self._tasks)} updates wait already; ask again later")
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Wait until all requested updates have ended; each has time limits of its own."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _done(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            # Mark the exception as retrieved; the caller gets it too, if it still waits.
            task.exception()

    async def _in_turn(self, folder: Path, label: str | None) -> InForce:
        async with self._turn:
            saved = await self._once_whole(lambda: look(folder, self._roots, self._marker))
            return await self._served(saved, label, lambda: named_tensors(saved, self._roots))

    async def _in_turn_pulled(self, label: str | None) -> InForce:
        async with self._turn:
            if self._pulling is None or self._pulled is None:
                raise RefusedError("the last pull failed; pull again before you update")
            return await self._served(self._pulled, label, self._pulling.named)

    async def _in_turn_pull(self, name: str, folder: Path, version: int) -> None:
        async with self._turn:
            pulling = self._pulling
            if pulling is None:
                raise RefusedError("this front builds on no checkpoint")
            self._pulled, self._pulled_into = None, name
            await self._once_whole(lambda: pulling.pull(folder, version))
            self._pulls += 1
            self._pulled = Pulled(name, self._pulls)

    async def _served(
        self, saved: SavedCheckpoint | Pulled, label: str | None, read: Callable[[], Named]
    ) -> InForce:
        version = self.in_force.version
        if saved != self.in_force.saved:
            try:
                version = await asyncio.to_thread(self._publisher.publish, read(), wait=False)
            except NotAnnouncedError:
                # The version is durable: a repeated request announces it, and makes no second one.
                version = self._publisher.version
                self.in_force = InForce(version, label or str(version), saved)
                raise
            # The version is announced: this version is in force however the wait ends.
            self.in_force = InForce(version, label or str(version), saved)
        await asyncio.to_thread(self._publisher.wait_served, version)
        self.in_force = InForce(version, label or str(version), saved)
        return self.in_force

    async def _once_whole(self, work: Callable[[], T]) -> T:
        until_s = self._clock() + self._whole_s
        while True:
            try:
                return await asyncio.to_thread(work)
            except NotWholeError as error:
                if self._clock() >= until_s:
                    raise NotWholeError(
                        f"{error}, after {self._whole_s:g} s; save it whole before it is named"
                    ) from None
            await asyncio.sleep(LOOK_S)
