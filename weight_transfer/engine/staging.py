"""Staging of an update: it is decoded and loaded while its engine serves.

decode      a thread: signature, chunks, digests of the new weights; then this rank's part of the
            changes is brought to the memory of its parameters, beside the engine's steps
load        between steps, piece by piece: a fresh dense load of the new version runs the probe

Pieces are counted, not timed: a probe is a collective, so all ranks have to come to it in one step.

`warm_kernels` compiles the kernels at start: numba takes seconds at first use, which would
otherwise fall into serving.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from weight_transfer.engine.applier import Placement
from weight_transfer.engine.proof.reference import Reference
from weight_transfer.engine.rectangle import Rectangle, live_bits
from weight_transfer.format.chunk import decode_chunk, encode_chunk
from weight_transfer.format.delta_codec import Level
from weight_transfer.format.digest import after_write, digest_of, updated
from weight_transfer.format.tensors import Bits, TensorBits, unsigned
from weight_transfer.kernels import processor_of
from weight_transfer.kernels.backend import Change
from weight_transfer.kernels.cpu.digest import scatter
from weight_transfer.receiver import StagedUpdate

if TYPE_CHECKING:
    import torch


_ROWS, _COLUMNS = 64, 64


def warm_kernels(base: Mapping[str, TensorBits], device: torch.device) -> None:
    """Run everything that an update runs, on a few weights of each type that `base` has.

    `device`: where the engine's weights are.
    """
    kinds = {tensor.dtype: tensor.bits.itemsize for tensor in base.values()}
    for dtype, width in kinds.items():
        rng = np.random.default_rng(0)
        bits = rng.integers(0, 200, _ROWS * _COLUMNS).astype(unsigned(width))
        old = TensorBits("warm", dtype, (_ROWS, _COLUMNS), bits)
        digest = digest_of(bits)
        for step in (1, 2, 16):  # dense, bitmap, and the two kinds of sparse
            new = bits.copy()
            new[::step] += 1
            changed = TensorBits("warm", dtype, old.shape, new)
            for level in Level:
                chunk = encode_chunk(old, changed, (0, _ROWS), digest, level)
                change = decode_chunk(chunk.encoded, old, digest)
                updated(digest, change.indices, change.old, change.new)
                after_write(digest, bits, change.indices, change.new)
        scatter(bits.copy(), change.indices, change.new)
        _scatter(bits.copy(), change, device)


def _scatter(flat: Bits, change: Change, device: torch.device) -> None:
    import torch

    transposed = Rectangle("", "", 0, 0, (_ROWS, _COLUMNS), (_COLUMNS, 1), (1, _ROWS))
    picked, places = transposed.locate(change.indices)
    transposed.digest_part(flat)
    # Also compile the kernels that a device runs under a pause.
    signed = torch.from_numpy(flat.view(f"<i{flat.itemsize}")).to(device)
    target = live_bits(signed)
    same = Change(places, change.new[picked], change.new[picked])
    processor_of(target).stage([(target, same)], same.new.nbytes * _ROWS).run()


@dataclass(frozen=True, slots=True)
class Decoded:
    """An update, and this rank's part of it where it will be written."""

    update: StagedUpdate
    placement: Placement


@dataclass(frozen=True, slots=True)
class Prepared(Decoded):
    """All that the pause needs; `placement` and `reference` belong to `update`."""

    reference: Reference


Work = Callable[[Decoded], Generator[None, None, Prepared]]


class Staging:
    """One update on its way. Its methods belong to the engine's thread."""

    def __init__(self, decode: Callable[[], Decoded], work: Work, attempt: str = "") -> None:
        self.attempt = attempt
        pool = ThreadPoolExecutor(1, thread_name_prefix="rose-stage")
        self._decoded: Future[Decoded] = pool.submit(decode)
        pool.shutdown(wait=False)
        self._work = work
        self._pieces: Generator[None, None, Prepared] | None = None
        self.prepared: Prepared | None = None
        """Update that is ready to commit, None until then."""

    @property
    def decoded(self) -> bool:
        """True once the thread has ended; `step` then raises its error, if any."""
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
        # A copy: the traceback of the exception itself keeps the decoded tensors alive.
        self._decoded.set_exception(copy.copy(failure))
