"""Staging of an update: it is decoded, loaded and placed while its engine serves, then written.

decode   a thread: signature, chunks, digests of the new weights
place    the same thread: find the changes that live on this rank, bring them to the memory of their
         parameters, beside the engine's steps
load     between steps, piece by piece: a fresh dense load of the new version runs the probe
write    under the pause: compare with the old, write the new, read back; O(changed)

Pieces are counted, not timed: a probe is a collective, so all ranks have to come to it in one step.
Opaque parameters, whose loader transforms weights, are copied from a fresh load, whole.

`warm_kernels` compiles the kernels at start: numba takes seconds at first use, which would
otherwise fall into serving.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from weight_transfer.apply.loader_map import LoaderMap
from weight_transfer.apply.receiver import StagedUpdate
from weight_transfer.apply.reference import Reference
from weight_transfer.apply.trace_loader import Rectangle, flat_view, live_bits
from weight_transfer.format.chunk import decode_chunk, encode_chunk
from weight_transfer.format.delta_codec import Level
from weight_transfer.format.digest import after_write, digest_of, updated
from weight_transfer.format.tensors import Bits, TensorBits, unsigned
from weight_transfer.kernels.cpu import scatter
from weight_transfer.kernels.processor import Change, Exchange, processor_of

if TYPE_CHECKING:
    import torch

RESIDENT_BYTES: Final = 2 << 30
"""Most bytes of a device that staged changes take: 2% of 13 billion bf16 weights."""
_ROWS, _COLUMNS = 64, 64


class OpaqueCopy:
    """Copy of all loose parameters from a fresh load into the live model, which can be undone.

    Modules with packed weights change places with those of the fresh load.
    """

    def __init__(
        self, model: torch.nn.Module, loader_map: LoaderMap, reference: Reference | None
    ) -> None:
        """Prepare the copy of what `reference` has into `model`; of None nothing is copied."""
        fresh = reference.loose if reference else {}
        self._live = {name: loader_map.parameter(name) for name in fresh}
        self._fresh = fresh
        modules = reference.modules if reference else {}
        self._modules = [(model.get_submodule(name), new) for name, new in modules.items()]
        self._swapped = False
        self._old: dict[str, torch.Tensor] = {}

    def write(self) -> tuple[str, ...]:
        """Copy the fresh values in place, saving the old.

        Return the names that do not read as written.
        """
        import torch

        wrong = []
        self._swap(to_fresh=True)
        with torch.inference_mode():
            for name, live in self._live.items():
                self._old.setdefault(name, flat_view(live).clone())
                fresh = self._fresh[name]
                if (live.shape, live.stride()) != (fresh.shape, fresh.stride()):
                    wrong.append(name)
                    continue
                flat_view(live).copy_(flat_view(fresh))
                if not torch.equal(flat_view(live), flat_view(fresh)):
                    wrong.append(name)
        return tuple(wrong)

    def write_back(self) -> None:
        """Write back the values that the loose parameters had before `write`."""
        import torch

        self._swap(to_fresh=False)
        with torch.inference_mode():
            for name, old in self._old.items():
                flat_view(self._live[name]).copy_(old)

    def _swap(self, *, to_fresh: bool) -> None:
        if self._swapped is to_fresh:
            return
        for live, fresh in self._modules:
            live.__dict__, fresh.__dict__ = fresh.__dict__, live.__dict__
        self._swapped = to_fresh


ParameterChange: TypeAlias = tuple[str, Change]
"""(Name of this rank's parameter, change of its flat memory), in the checkpoint's order."""


@dataclass(frozen=True, slots=True)
class UpdatePlacement:
    """One rank's part of an update: (changes by parameter, staged changes) for each device."""

    groups: tuple[tuple[tuple[ParameterChange, ...], Exchange], ...]

    @property
    def changes(self) -> tuple[ParameterChange, ...]:
        """All changes of this rank's parameters, on all devices."""
        return tuple(each for changes, _ in self.groups for each in changes)


def place(
    loader_map: LoaderMap, staged: StagedUpdate, resident_bytes: int = RESIDENT_BYTES
) -> UpdatePlacement:
    """Return this rank's part of an update, with its changes staged in the parameters' memory.

    Weights are neither read nor written: the engine may serve meanwhile. Raises DeviceMemoryError.
    """
    groups: dict[str, list[ParameterChange]] = defaultdict(list)
    for name, change in _located(loader_map, staged):
        groups[str(loader_map.parameter(name).device)].append((name, change))
    return UpdatePlacement(
        tuple((tuple(c), _staged(loader_map, c, resident_bytes)) for c in groups.values())
    )


def write(placement: UpdatePlacement) -> tuple[str, ...]:
    """Write an update's new values into the live parameters.

    Return the names of those that are odd. A parameter is odd if it did not hold the old values, or
    does not read as the new ones. If none is and the digests were right before, they are right now,
    since those of the staged update were checked against its manifest.
    """
    unproven = []
    for changes, exchange in placement.groups:
        counts = exchange.run()
        unproven += [name for (name, _), odd in zip(changes, counts, strict=True) if odd.any()]
    return tuple(unproven)


def write_back(placement: UpdatePlacement) -> None:
    """Write an update's old values into the live parameters; running it again is harmless."""
    for _, exchange in placement.groups:
        exchange.run(back=True)


def _located(loader_map: LoaderMap, staged: StagedUpdate) -> Iterator[ParameterChange]:
    for tensor in staged.tensors:
        change = tensor.change
        for rectangle in loader_map.rectangles(tensor.name):
            picked, places = rectangle.locate(change.indices)
            if picked.size:
                yield rectangle.target, Change(places, change.old[picked], change.new[picked])


def _staged(loader_map: LoaderMap, changes: list[ParameterChange], resident_bytes: int) -> Exchange:
    targets = [(loader_map.bits(name), change) for name, change in changes]
    return processor_of(*(target for target, _ in targets)).stage(targets, resident_bytes)


def warm_kernels(base: Mapping[str, TensorBits], device: torch.device) -> None:
    """Compile all kernels of an update by running them on a few weights of each dtype in `base`.

    `device`: device of the engine's weights.
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
    """A decoded update, and this rank's part of it, staged in the parameters' memory."""

    update: StagedUpdate
    placement: UpdatePlacement


@dataclass(frozen=True, slots=True)
class Prepared(Decoded):
    """A decoded update with its probe reference: all that a commit needs."""

    reference: Reference


Work = Callable[[Decoded], Generator[None, None, Prepared]]


class Staging:
    """Update that is being decoded by a thread and then loaded piece by piece.

    Only the engine's own thread may call its methods.
    """

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
        """True once the decoding thread has ended, in success or failure.

        `step` raises its error.
        """
        return self._decoded.done()

    def wait(self, seconds: float) -> None:
        """Wait for the decoding thread for up to that many seconds."""
        wait((self._decoded,), seconds)

    def step(self, pieces: int | None = None) -> bool:
        """Load `pieces` pieces, or all if None; return True once the update is ready to commit.

        It waits for the decoding thread first. Raises what decoding or loading raised, in each
        later call too.
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
        """Give the update up: wait for the decoding thread, ignore its result and stop loading."""
        self._decoded.exception()
        if self._pieces is not None:
            self._pieces.close()

    def _forget(self, failure: BaseException) -> None:
        """Keep the failure alone, since decoded changes may take memory of a device."""
        self._decoded = Future()
        # A copy: the traceback of the exception itself keeps the decoded tensors alive.
        self._decoded.set_exception(copy.copy(failure))
