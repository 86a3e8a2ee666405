"""Staging: an update is verified, placed and computed while its engine serves.

decode      a thread: signature, chunks, digests of the new weights; nothing of the engine's
place       this rank's part of the changes
reference   between steps, piece by piece: a fresh dense load of the new version runs the probe

Pieces are counted, not timed: a probe is a collective, so all ranks have to come to it in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from weight_transfer.receiver import StagedUpdate
from weight_transfer.vllm.applier import Placed
from weight_transfer.vllm.reference import Reference


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that the pause needs; `placed` and `reference` belong to `update`."""

    update: StagedUpdate
    placed: tuple[Placed, ...]
    reference: Reference


Work = Callable[[StagedUpdate], Generator[None, None, Prepared]]


class Staging:
    """One update on its way. Its methods belong to the engine's thread."""

    def __init__(self, decode: Callable[[], StagedUpdate], work: Work) -> None:
        pool = ThreadPoolExecutor(1, thread_name_prefix="rose-stage")
        self._decoded: Future[StagedUpdate] = pool.submit(decode)
        pool.shutdown(wait=False)
        self._work = work
        self._pieces: Generator[None, None, Prepared] | None = None
        self.prepared: Prepared | None = None
        """What became of it, None as long as something is left to do."""

    @property
    def decoded(self) -> bool:
        """Whether the thread is through; `step` then tells how it went."""
        return self._decoded.done()

    def step(self, pieces: int | None = None) -> bool:
        """Do some pieces, or all; waits for the thread. True when it is prepared.

        Raises what decoding or loading raised.
        """
        update = self._decoded.result()
        if self._pieces is None:
            self._pieces = self._work(update)
        while self.prepared is None and pieces != 0:
            try:
                next(self._pieces)
            except StopIteration as end:
                self.prepared = end.value
            pieces = None if pieces is None else pieces - 1
        return self.prepared is not None

    def drop(self) -> None:
        """Wait for the thread; nobody wants what it makes."""
        self._decoded.exception()
        if self._pieces is not None:
            self._pieces.close()
