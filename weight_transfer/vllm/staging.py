"""Staging: an update is verified, placed and computed while its engine serves.

decode      a thread: signature, chunks, digests of the new weights; then this rank's part of the
            changes is brought to the memory of its parameters, beside the engine's steps
reference   between steps, piece by piece: a fresh dense load of the new version runs the probe

Pieces are counted, not timed: a probe is a collective, so all ranks have to come to it in one step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from weight_transfer.receiver import StagedUpdate
from weight_transfer.vllm.applier import Placement
from weight_transfer.vllm.reference import Reference


@dataclass(frozen=True, slots=True)
class Decoded:
    """An update, and this rank's part of it where it will be written."""

    update: StagedUpdate
    placement: Placement


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that the pause needs; `placement` and `reference` belong to `update`."""

    update: StagedUpdate
    placement: Placement
    reference: Reference


Work = Callable[[Decoded], Generator[None, None, Prepared]]


class Staging:
    """One update on its way. Its methods belong to the engine's thread."""

    def __init__(self, decode: Callable[[], Decoded], work: Work) -> None:
        pool = ThreadPoolExecutor(1, thread_name_prefix="rose-stage")
        self._decoded: Future[Decoded] = pool.submit(decode)
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

        Raises what decoding or loading raised, each time that it is asked.
        """
        decoded = self._decoded.result()
        if self._pieces is None:
            self._pieces = self._work(decoded)
        while self.prepared is None and pieces != 0:
            try:
                next(self._pieces)
            except StopIteration as end:
                self.prepared = end.value
            except BaseException as failure:
                self._forget(failure)
                raise
            pieces = None if pieces is None else pieces - 1
        return self.prepared is not None

    def drop(self) -> None:
        """Wait for the thread; nobody wants what it makes."""
        self._decoded.exception()
        if self._pieces is not None:
            self._pieces.close()

    def _forget(self, failure: BaseException) -> None:
        """Keep nothing but the failure: what was decoded may take memory of a device."""
        self._decoded = Future()
        # One of its own: the traceback of this one leads to all that it was about.
        self._decoded.set_exception(copy.copy(failure))
