"""One copy of a checkpoint for all ranks of an engine on a node.

Weights that no version has changed yet are where the checkpoint's files are: mapped, in the page
cache. A tensor moves into a segment when a version first changes it. One rank
leads:

leader     decode: each tensor into a segment of the update, `progress` goes up → commit: overwrite
           the copy with it, then its `version`
followers  decode: wait for each tensor, prove it against the signed manifest → commit: wait for
           `version`, then look where tensors are
A waiting rank sees the leader's failure, its end, or a minute without progress; each is an error,
and nothing that was decoded until then can be committed. A rank without others leads alone.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import blake3
import numpy as np
from numpy.typing import NDArray

from weight_transfer import errors
from weight_transfer.apply.receiver import StagedTensor, StagedUpdate, UpdatePlan
from weight_transfer.apply.shared_segment import (
    Address,
    ProcessWatch,
    SharedSegment,
    elect,
    map_private,
)
from weight_transfer.errors import (
    DigestMismatchError,
    StoreError,
    TensorFormatError,
    WeightError,
    WrongBaseError,
)
from weight_transfer.format.checkpoint import Checkpoint, CheckpointEntry, view
from weight_transfer.format.digest import after_write, digest_of
from weight_transfer.format.manifest import hex_digest
from weight_transfer.format.tensors import Bits, TensorBits, unsigned
from weight_transfer.kernels.cpu import scatter
from weight_transfer.kernels.processor import Change

POLL_S: Final = 0.005
SILENT_S: Final = 60.0
"""Longest time without progress of a leader, which decodes a tensor in seconds."""
_PAGE: Final = mmap.PAGESIZE
_LINE: Final = 64
_MAGIC: Final = int.from_bytes(b"ROSENODE", "little")
_IDENTITY_WORDS: Final = 4
_ERROR_BYTES: Final = 4096
Words = NDArray[np.uint64]
DecodeTensor = Callable[[str], StagedTensor]
_PREPARING, _READY, _FAILED = 0, 1, 2


class _SegmentHead:
    """Words at the beginning of a segment, by which leader and followers communicate.

    magic | identity: 4 words | state | progress | version | parent | wire bytes | error bytes |
    sequence (odd while the five after it are written), device, inode, nbytes, descriptor of the
    segment of the newest update
    """

    WORDS = 32

    def __init__(self, data: NDArray[np.uint8]) -> None:
        self.words: Words = data[: 8 * self.WORDS].view(np.uint64)
        self.error: NDArray[np.uint8] = data[8 * self.WORDS : 8 * self.WORDS + _ERROR_BYTES]

    @classmethod
    def nbytes(cls) -> int:
        return 8 * cls.WORDS + _ERROR_BYTES

    def begin(self, identity: bytes) -> None:
        self.words[1 : 1 + _IDENTITY_WORDS] = np.frombuffer(identity, np.uint64)
        self.words[0] = _MAGIC

    def is_about(self, identity: bytes) -> bool:
        stored = self.words[1 : 1 + _IDENTITY_WORDS].tobytes()
        return bool(self.words[0] == _MAGIC) and stored == identity

    def _get(self, at: int) -> int:
        return int(self.words[at])

    def _set(self, at: int, value: int) -> None:
        self.words[at] = value

    state = property(lambda self: self._get(5), lambda self, value: self._set(5, value))
    progress = property(lambda self: self._get(6), lambda self, value: self._set(6, value))
    version = property(lambda self: self._get(7), lambda self, value: self._set(7, value))

    def fail(self, error: BaseException) -> None:
        """Write an error into the shared segment, and the failed state, for the ranks that wait."""
        text = f"{type(error).__name__}\n{error}".encode()[:_ERROR_BYTES]
        self.error[: len(text)] = np.frombuffer(text, np.uint8)
        self._set(10, len(text))
        self.state = _FAILED

    def raise_failure(self) -> None:
        """Raise the error that the leading rank wrote into the segment, if it did."""
        if self.state != _FAILED:
            return
        text = self.error[: min(self._get(10), _ERROR_BYTES)].tobytes().decode(errors="replace")
        name, _, message = text.partition("\n")
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, WeightError):
            raise kind(message)
        raise StoreError(f"the rank that decodes failed: {name}: {message}")

    def announce(self, address: Address) -> None:
        self.words[11] += np.uint64(1)
        fields = address.device, address.inode, address.nbytes, address.descriptor
        self.words[12:16] = np.array(fields, np.uint64)
        self.words[11] += np.uint64(1)

    def announced(self, leader: Address) -> Address | None:
        """Return the address of the leader's newest update, None if none or while it is
        replaced."""
        sequence = self._get(11)
        device, inode, nbytes, descriptor = (int(word) for word in self.words[12:16])
        if not sequence or sequence % 2 or self._get(11) != sequence:
            return None
        return Address(leader.namespace, leader.pid, descriptor, device, inode, nbytes)


@dataclass(frozen=True, slots=True)
class _CopyLayout:
    """Layout of the shared copy's segment: head, digests, moved flags, tensors by page."""

    names: tuple[str, ...]
    offsets: Mapping[str, int]
    nbytes: int
    identity: bytes

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> _CopyLayout:
        """Return the layout of a checkpoint's copy.

        Its identity covers sizes and times of the files: ranks that read other files do not match.
        """
        at = _up(_SegmentHead.nbytes() + 16 * len(checkpoint.names), _PAGE)
        offsets, said = {}, blake3.blake3()
        for name in checkpoint.names:
            entry = checkpoint.entry(name)
            assert entry is not None
            offsets[name] = at
            at = _up(at + entry.end - entry.begin, _PAGE)
            said.update(f"{name} {entry.dtype} {entry.shape} {entry.begin}\n".encode())
        for shard in checkpoint.shards:
            found = checkpoint.file(shard.path).stat()
            said.update(f"{shard.path} {found.st_size} {found.st_mtime_ns}\n".encode())
        return cls(checkpoint.names, offsets, at, said.digest())

    def table(self, data: NDArray[np.uint8]) -> Words:
        """Return u64[2, tensors] in the segment: digests, and 1 for each tensor that was moved
        there."""
        begin = _SegmentHead.nbytes()
        table: Words = data[begin : begin + 16 * len(self.names)].view(np.uint64)
        return table.reshape(2, len(self.names))


class NodeCopy:
    """Copy of a checkpoint that all ranks of an engine on a node share, a `WeightCopy`.

    The leading rank decodes updates and writes them; the others read and verify them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        place: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Take `checkpoint` as version 0 and share it with all ranks that use the same `place`.

        `place` None: share it with no rank. The leader reads and digests all of it; a follower
        waits for that. Raise StoreError.
        """
        self._files = _Files(checkpoint)
        self._layout = _CopyLayout.of(checkpoint)
        self._clock, self._sleep = clock, sleep
        segment = SharedSegment.make("rose-weights", self._layout.nbytes)
        head = _SegmentHead(segment.data)
        head.begin(self._layout.identity)
        leader = segment.address if place is None else elect(place, segment.address)
        self._alone = place is None
        self._leader = leader
        self._watch: ProcessWatch | None = None
        if leader != segment.address:
            self._watch = ProcessWatch(leader)
            segment = SharedSegment.open(leader)
            head = _SegmentHead(segment.data)
            if not head.is_about(self._layout.identity):
                raise StoreError("the ranks of this node read different checkpoints")
        self._segment, self._head = segment, head
        self._table = self._layout.table(segment.data)
        self._update: SharedSegment | None = None
        self.version = 0
        self.tensors: dict[str, TensorBits] = {n: self._files.tensor(n) for n in self._layout.names}
        self.digests: dict[str, int] = {}
        if self.leads:
            self._prepare()
        else:
            self._wait(head, lambda: head.state == _READY)
            if head.version:
                raise StoreError(f"the ranks of this node are at version {head.version} already")
            self._look()

    @property
    def leads(self) -> bool:
        """True if this rank leads: it decodes updates for all ranks of the engine on this node."""
        return self._watch is None

    def decode(self, plan: UpdatePlan, decode: DecodeTensor, attempt: str = "") -> StagedUpdate:
        """Return an update that the leader decodes by `decode` once for all ranks, in shared
        memory.

        `attempt`: name of this try, the same on all ranks and new for each try. Raises what the
        leader's `decode` raised, on all ranks; StoreError when a follower waits in vain;
        DigestMismatchError for decoded weights that the manifest does not describe.
        """
        if not (attempt or self._alone):
            raise StoreError("ranks that share a copy have to be told a name of each attempt")
        name = f"{attempt} {plan.version} {plan.parent} {plan.wire_bytes}"
        identity = blake3.blake3(name.encode()).digest()
        return (self._lead if self.leads else self._follow)(plan, decode, identity)

    def write(self, staged: Iterable[StagedTensor], version: int) -> None:
        """Move to `version`: the leader writes the new values, a follower waits until it has.

        Doing it again is harmless. Raises StoreError, WrongBaseError.
        """
        if self.leads:
            for each in staged:
                tensor = self._writable(each.name)
                scatter(tensor.bits, each.change.indices, each.change.new)
                self._note(each.name, each.digest_after)
                self._head.progress += 1
            self._head.version = version
        elif version != self.version:
            self._wait(self._head, lambda: self._head.version != self.version)
            if self._head.version != version:
                raise WrongBaseError(
                    f"the node's weights are at version {self._head.version}, not at {version}"
                )
            self._look()
        self.version = version
        self._update = None

    def _prepare(self) -> None:
        try:
            for name in self._layout.names:
                tensor = self.tensors[name]
                if not tensor.bits.flags.aligned:
                    tensor = self._writable(name)
                self._note(name, digest_of(tensor.bits))
                self._head.progress += 1
        except BaseException as error:
            self._head.fail(error)
            raise
        self._head.state = _READY

    def _lead(self, plan: UpdatePlan, decode: DecodeTensor, identity: bytes) -> StagedUpdate:
        self._update = None
        rooms = [self._room(plan, name) for name in plan.tensors]
        arena = _Arena(SharedSegment.make("rose-update", _Arena.nbytes(rooms)), rooms)
        arena.head.begin(identity)
        self._update = arena.segment
        self._head.announce(arena.segment.address)
        try:
            tensors = [arena.put(at, decode(name)) for at, name in enumerate(plan.tensors)]
        except BaseException as error:
            arena.head.fail(error)
            raise
        return plan.update(tensors)

    def _follow(self, plan: UpdatePlan, _: DecodeTensor, identity: bytes) -> StagedUpdate:
        rooms = [self._room(plan, name) for name in plan.tensors]
        arena = _Arena(self._await_update(identity), rooms)
        tensors = []
        for at, name in enumerate(plan.tensors):
            self._wait(arena.head, lambda at=at: arena.head.progress > at)  # type: ignore[misc]
            tensor = self.tensors[name]
            tensors.append(arena.take(at, tensor, self.digests[name]))
            last = plan.tensors[name][-1]
            if last.digest_after != hex_digest(tensors[-1].digest_after):
                raise DigestMismatchError(f"{name}: decoded weights are not the published ones")
        return plan.update(tensors)

    def _await_update(self, identity: bytes) -> SharedSegment:
        """Return the segment of the attempt with this identity, once the leader has made it.

        Raises StoreError after SILENT_S.
        """
        deadline_s = self._clock() + SILENT_S
        while True:
            address = self._head.announced(self._leader)
            if address is not None:
                with suppress(StoreError):  # The one of an earlier update is withdrawn, or not yet.
                    segment = SharedSegment.open(address)
                    if _SegmentHead(segment.data).is_about(identity):
                        return segment
            self._insist_led()
            if self._clock() > deadline_s:
                raise StoreError("the rank that decodes did not begin this update; ask again")
            self._sleep(POLL_S)

    def _wait(self, head: _SegmentHead, ready: Callable[[], bool]) -> None:
        """Return once `ready` returns True.

        Raises the leader's error, and StoreError when the leader ended or made no progress for
        SILENT_S.
        """
        progress, deadline_s = head.progress, self._clock() + SILENT_S
        while not ready():
            head.raise_failure()
            self._insist_led()
            if head.progress != progress:
                progress, deadline_s = head.progress, self._clock() + SILENT_S
            elif self._clock() > deadline_s:
                raise StoreError(f"the rank that decodes stood still for {SILENT_S:.0f} s")
            self._sleep(POLL_S)

    def _insist_led(self) -> None:
        if self._watch is not None and self._watch.ended:
            raise StoreError("the rank that decodes has ended; start this engine anew")

    def _room(self, plan: UpdatePlan, name: str) -> tuple[int, int]:
        bits = self.tensors[name].bits
        return plan.most_changed(name, bits.size), bits.itemsize

    def _note(self, name: str, digest: int) -> None:
        self.digests[name] = digest
        self._table[0, self._at[name]] = digest

    @property
    def _at(self) -> Mapping[str, int]:
        return self._files.at

    def _writable(self, name: str) -> TensorBits:
        """Return the leader's tensor in the shared segment; it is copied there the first time."""
        if not self._table[1, self._at[name]]:
            moved = self._moved(name)
            moved.bits[:] = self.tensors[name].bits
            self.tensors[name] = moved
            self._table[1, self._at[name]] = 1
            self._files.forget(name)
        return self.tensors[name]

    def _moved(self, name: str) -> TensorBits:
        old, begin = self.tensors[name], self._layout.offsets[name]
        part = self._segment.data[begin : begin + old.bits.nbytes]
        bits: Bits = part.view(unsigned(old.bits.itemsize))
        return TensorBits(name, old.dtype, old.shape, bits)

    def _look(self) -> None:
        """Read the digests anew, and map tensors that the leader has moved into the shared
        segment."""
        for name, at in self._at.items():
            self.digests[name] = int(self._table[0, at])
            if self._table[1, at]:
                self.tensors[name] = self._moved(name)
                self._files.forget(name)


class _Files:
    """Files of a checkpoint, mapped copy-on-write and never written to."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.at = {name: at for at, name in enumerate(checkpoint.names)}
        self._entries: dict[str, tuple[str, CheckpointEntry]] = {}
        self._maps: dict[str, tuple[mmap.mmap, NDArray[np.uint8]]] = {}
        for shard in checkpoint.shards:
            with checkpoint.file(shard.path).open("rb") as file:
                mapped = map_private(file.fileno(), shard.size)
            self._maps[shard.path] = mapped, np.frombuffer(mapped, np.uint8)
            self._entries |= {entry.name: (shard.path, entry) for entry in shard.entries}

    def tensor(self, name: str) -> TensorBits:
        """Return a tensor as its file has it, as a view."""
        path, entry = self._entries[name]
        return view(self._maps[path][1], entry)

    def forget(self, name: str) -> None:
        """Drop this process's mapped pages of a tensor's file, which is not read any more."""
        path, entry = self._entries[name]
        first, end = _up(entry.begin, _PAGE), entry.end // _PAGE * _PAGE
        if first < end:
            self._maps[path][0].madvise(mmap.MADV_DONTNEED, first, end - first)


class _Arena:
    """Decoded changes of an update in a shared segment of their own.

    head | u64[tensors, 2]: changed weights, digest after | for each tensor, in pages of its own:
    indices i64, new weights, old weights
    """

    def __init__(self, segment: SharedSegment, rooms: Sequence[tuple[int, int]]) -> None:
        """Map the parts of a segment that has `rooms` for the tensors of an update.

        `rooms`: (most weights that may change, bytes of a weight) for each tensor. Raise StoreError
        for a segment of another size.
        """
        if segment.address.nbytes != self.nbytes(rooms):
            raise StoreError("the rank that decodes reads another update; stage it again")
        self.segment = segment
        self.head = _SegmentHead(segment.data)
        self._rooms = rooms
        begin, count = _SegmentHead.nbytes(), len(rooms)
        table: Words = segment.data[begin : begin + 16 * count].view(np.uint64)
        self._table = table.reshape(count, 2)
        self._offsets = self._places(rooms)

    @classmethod
    def nbytes(cls, rooms: Sequence[tuple[int, int]]) -> int:
        """Return the bytes of a segment with these rooms for tensors.

        Only written pages take memory.
        """
        return cls._places(rooms)[-1]

    def put(self, at: int, tensor: StagedTensor) -> StagedTensor:
        """Copy a decoded tensor into the segment, as the leader, and return it as it is there."""
        change, count = tensor.change, tensor.change.indices.size
        if count > self._rooms[at][0]:
            raise TensorFormatError(f"{tensor.name}: more weights changed than were announced")
        self._table[at] = np.array((count, tensor.digest_after), np.uint64)
        shared = self._change(at, count)
        shared.indices[:], shared.old[:], shared.new[:] = change.indices, change.old, change.new
        # Followers see the parts before the progress: the interpreter's lock orders both writes.
        self.head.progress = at + 1
        return StagedTensor(tensor.name, shared, tensor.digest_after)

    def take(self, at: int, active: TensorBits, digest: int) -> StagedTensor:
        """Return the change that the leader put, verified against `active`, as a follower.

        `digest`: digest of `active`. Raises DigestMismatchError.
        """
        count, after = (int(word) for word in self._table[at])
        if count > self._rooms[at][0]:
            raise DigestMismatchError(f"{active.name}: {count} changes are out of bounds")
        change = self._change(at, count)
        indices = change.indices
        inside = not count or (indices.min() >= 0 and indices.max() < active.bits.size)
        if not inside or after_write(digest, active.bits, indices, change.new) != after:
            raise DigestMismatchError(f"{active.name}: what was decoded for all ranks is damaged")
        if not np.array_equal(active.bits[indices], change.old):
            raise DigestMismatchError(f"{active.name}: it was decoded for other weights")
        return StagedTensor(active.name, change, after)

    def _change(self, at: int, count: int) -> Change:
        room, width = self._rooms[at]
        begin = self._offsets[at]
        first, second = begin + 8 * room, begin + (8 + width) * room

        def part(start: int, kind: np.dtype[np.unsignedinteger]) -> Bits:
            return self.segment.data[start : start + kind.itemsize * count].view(kind)

        indices: NDArray[np.int64] = part(begin, unsigned(8)).view(np.int64)
        kind = unsigned(width)
        return Change(indices, old=part(second, kind), new=part(first, kind))

    @staticmethod
    def _places(rooms: Sequence[tuple[int, int]]) -> list[int]:
        """Return the offset of each tensor in the segment, and the end of the last one."""
        at = _up(_SegmentHead.nbytes() + 16 * len(rooms), _PAGE)
        places = [at]
        for room, width in rooms:
            at = _up(at + (8 + 2 * width) * room, _LINE)
            places.append(at)
        return places


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
