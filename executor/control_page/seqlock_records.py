"""Records of the control page and their fixed binary forms, and the sections that hold them.

A section is one single-writer record in shared memory, guarded by a sequence lock and a CRC:

    word 0  sequence: 0 never written, odd while a write is under way, even when whole
    word 1  CRC-32 of the payload, seeded with the sequence
    then    payload

The CRC catches what the sequence cannot: a store order other than the one written here, a second
writer by mistake, a payload of another generation. A writer that died leaves an odd sequence; the
next write, by the section's next holder, moves on to a fresh even one.

A record is a dataclass whose fields, in their order, are its binary form: `record` reads the table
off them once. Text is last and is cut to its room. Times are CLOCK_MONOTONIC nanoseconds, so the
processes of one machine can compare them. Zeroed memory decodes to the harmless value of every
record (grant: FREEZE, expired).
"""

import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from math import isfinite
from typing import Any, ClassVar, Final, Generic, Self, TypeVar, dataclass_transform

from executor.errors import PageUnreadable

REQUEST_ID_BYTES = 80
REASON_BYTES = 32
MOST_INT = 1 << 62
"""Exclusive upper bound of every number on the page: sums of a few still fit 64 bits."""
NO_DEADLINE = 0
"""Value of a deadline field when no request waits for that kind of token."""
WORD = 8
HEADER_BYTES = 2 * WORD
SPINS = 8
NAPS = 4
NAP_S = 50e-6
_SEED = 0xFFFFFFFF


class GrantMode(IntEnum):
    """Mode of a guest's grant; FREEZE is 0, so that zeroed memory freezes the guest."""

    FREEZE = 0
    RUN = 1
    THROTTLE = 2
    DRAIN = 3
    KILL = 4


_FORMATS: Final[dict[Any, str]] = {int: "q", bool: "?", float: "d", GrantMode: "q"}


class PageRecord:
    """Base of the records in the page's sections, which `record` makes into fixed binary layouts.

    NAMES: all fields. NUMBERS: how many of them, from the first on, are not text. FLOATS: positions
    of the fields with a fraction. READERS: by position, conversions of values that the struct does
    not return as fields.
    """

    __slots__ = ()

    LAYOUT: ClassVar[struct.Struct]
    NAMES: ClassVar[tuple[str, ...]]
    NUMBERS: ClassVar[int]
    FLOATS: ClassVar[tuple[int, ...]]
    READERS: ClassVar[dict[int, Callable[[Any], object]]]

    def pack(self) -> bytes:
        """Return the record's binary form, LAYOUT.size bytes; `record` replaces this method."""
        raise NotImplementedError

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """Return the record that the bytes encode. Raises ValueError for impossible numbers."""
        values: Sequence[Any] = cls.LAYOUT.unpack(raw)
        numbers = values[: cls.NUMBERS]
        for at in cls.FLOATS:
            if not isfinite(numbers[at]):
                raise ValueError(f"{numbers[at]} is no number")
        if min(numbers) < 0 or max(numbers) >= MOST_INT:
            raise ValueError("a number is out of range")
        if cls.READERS:
            values = list(values)
            for at, read in cls.READERS.items():
                values[at] = read(values[at])
        return cls(*values)

    @classmethod
    def packer(cls, *names: str) -> Callable[..., bytes]:
        """Return a function that takes all field values and returns a record's binary form.

        It saves a writer at every step the making of a record. Raises TypeError unless `names` are
        all of the record's fields, in its order.
        """
        if names != cls.NAMES:
            raise TypeError(f"{cls.__name__} has the fields {', '.join(cls.NAMES)}")
        return cls.LAYOUT.pack


R = TypeVar("R", bound=PageRecord)


@dataclass_transform(frozen_default=True)
def record(text_bytes: int = 0) -> Callable[[type[R]], type[R]]:
    """Return a class decorator that makes a frozen dataclass with a binary layout of its fields.

    `text_bytes`: room for the last field, if it is text. The decorator raises TypeError for a field
    without a binary form.
    """

    def laid_out(plain: type[R]) -> type[R]:
        made: type[R] = dataclass(frozen=True, slots=True)(plain)
        kinds: dict[str, Any] = {f.name: f.type for f in fields(made)}  # type: ignore[arg-type]
        made.NAMES = names = tuple(kinds)
        made.FLOATS = tuple(at for at, kind in enumerate(kinds.values()) if kind is float)
        made.READERS = {at: GrantMode for at, k in enumerate(kinds.values()) if k is GrantMode}
        text = ""
        if text_bytes:
            if kinds.pop(names[-1]) is not str:
                raise TypeError(f"{made.__name__}.{names[-1]} is no text; text stands last")
            text = f"{text_bytes}s"
            made.READERS[len(kinds)] = _decode_text
        made.NUMBERS = len(kinds)
        for name, kind in kinds.items():
            if kind not in _FORMATS:
                raise TypeError(f"{made.__name__}.{name} has no binary form; text stands last")
        made.LAYOUT = struct.Struct("=" + "".join(_FORMATS[k] for k in kinds.values()) + text)
        made.pack = _packing(made.LAYOUT, names, text=bool(text))  # type: ignore[method-assign,assignment]
        return made

    return laid_out


def _packing(
    layout: struct.Struct, names: Sequence[str], *, text: bool
) -> Callable[[object], bytes]:
    # Made from source, like dataclasses' methods: attributes in the code are twice as fast as by
    # name.
    values = ", ".join(f"record.{name}" for name in names) + ".encode()" * text
    made: Callable[[object], bytes] = eval(f"lambda record: pack({values})", {"pack": layout.pack})  # noqa: S307
    return made


def _decode_text(raw: bytes) -> str:
    # A cut at a byte limit may split a character: its rest is dropped.
    return raw.rstrip(b"\0").decode("utf-8", errors="ignore")


@record()
class HostState(PageRecord):
    """Host section of an engine core: its queue, step, deadlines and KV memory.

    A deadline is NO_DEADLINE if no request waits for that kind of token. A host that lends has
    `granules_total` KV granules, keeps no pages under `granules_lent` of them (`bytes_lent`:
    measured), and lacks `reserve_missing` granules of its reserve, which it will take back.
    """

    step_seq: int = 0
    in_step: bool = False
    running: int = 0
    waiting: int = 0
    queued_prefill_tokens: int = 0
    earliest_prefill_deadline_ns: int = NO_DEADLINE
    earliest_decode_deadline_ns: int = NO_DEADLINE
    kv_used: int = 0
    kv_total: int = 0
    busy_ns: int = 0
    last_step_ns: int = 0
    heartbeat_ns: int = 0
    granules_total: int = 0
    granules_lent: int = 0
    bytes_lent: int = 0
    reserve_missing: int = 0

    @property
    def idle(self) -> bool:
        """True if no request is running or waiting and no step is in flight.

        The state holds from `heartbeat_ns` until the host writes again.
        """
        return not (self.in_step or self.running or self.waiting)


@record()
class SeatState(PageRecord):
    """Seat section of an engine core: the holder of its seat since `taken_ns`, and its last beat.

    `pid`, `started` (clock ticks since boot) and `pid_namespace` (inode) are hints for people and
    for a guard in the same namespace; the lock decides who holds the seat. `cores`: number of the
    host's engine cores, each with a seat.
    """

    pid: int = 0
    started: int = 0
    pid_namespace: int = 0
    taken_ns: int = 0
    beat_ns: int = 0
    cores: int = 1


@record(text_bytes=REASON_BYTES)
class Grant(PageRecord):
    """Grant section of the page: compute and KV memory that the guest may use until `expiry_ns`.

    `slack_share`: in 0..1, share of the host's slack that steps may take; 0 allows host-idle time
    only. `kv_granule_cap`: KV granules that the guest may keep pages under; 0 sets no cap. One
    granule always stays.
    """

    mode: GrantMode = GrantMode.FREEZE
    token_budget: int = 0
    max_sequences: int = 0
    kv_granule_cap: int = 0
    slack_share: float = 0.0
    epoch: int = 0
    expiry_ns: int = 0
    heartbeat_ns: int = 0
    reason: str = ""


@record(text_bytes=REASON_BYTES)
class GuestState(PageRecord):
    """Guest section of the page: work and memory of the guest; `heartbeat_ns` shows that it lives.

    `bytes_mapped`: KV memory that is not known to have been given back. The guest keeps pages under
    `granules_mapped` of its `granules_total` KV granules of `granule_bytes` each. `yielded_ns`:
    total time for which the gate refused steps.
    """

    step_seq: int = 0
    in_step: bool = False
    last_step_ns: int = 0
    tokens_total: int = 0
    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    bytes_mapped: int = 0
    policy_version: int = 0
    yielded_ns: int = 0
    heartbeat_ns: int = 0
    granules_total: int = 0
    granules_mapped: int = 0
    granule_bytes: int = 0
    gate_reason: str = ""


@record(text_bytes=REQUEST_ID_BYTES)
class LatencyRecord(PageRecord):
    """Latencies of one finished request of the host.

    `tpot_ns` is 0 with fewer than two tokens, `ttft_ns` if another host computed the prompt.
    """

    finished_ns: int
    ttft_ns: int
    tpot_ns: int
    e2e_ns: int
    prompt_tokens: int
    output_tokens: int
    request_id: str


def section_bytes(record: type[PageRecord]) -> int:
    """Return the bytes that a section of this record type takes, rounded up to a multiple of 64."""
    return -(-(HEADER_BYTES + record.LAYOUT.size) // 64) * 64


class PageSection(Generic[R]):
    """One record in shared memory with one writer, at byte `offset` (a multiple of 8) of `view`."""

    __slots__ = ("_payload", "_record", "_word", "_words", "start")

    def __init__(self, view: memoryview, offset: int, record: type[R]) -> None:
        # Aligned native 64-bit stores: a reader sees an old or a new sequence, never half of each.
        self._words = view.cast("Q")
        self._word = offset // WORD
        self.start = offset + HEADER_BYTES
        self._payload = view[self.start : self.start + record.LAYOUT.size]
        self._record = record

    @property
    def sequence(self) -> int:
        """Sequence number, changed by every write; 0 if none was made, odd during a write."""
        return self._words[self._word]

    def write(self, record: R) -> None:
        """Publish `record`; only the section's one writer may call this."""
        self.write_packed(record.pack())

    def write_packed(self, payload: bytes) -> None:
        """Publish a record in binary form (LAYOUT.size bytes), for a writer at every step."""
        words, word = self._words, self._word
        writing = (words[word] + 1) | 1
        words[word] = writing
        self._payload[:] = payload
        words[word + 1] = zlib.crc32(payload, (writing + 1) & _SEED)
        words[word] = writing + 1

    def read(self) -> R | None:
        """Return the last whole record, None if none was ever written.

        Raises PageUnreadable if no consistent content was seen in SPINS + NAPS tries.
        """
        for attempt in range(SPINS + NAPS):
            if attempt >= SPINS:
                time.sleep(NAP_S)
            if self.sequence == 0:
                return None
            if (found := self.read_after(0)) is not None:
                return self._decode(found[1])
        raise PageUnreadable(
            f"{self._record.__name__} section stays torn: its writer died in a write or hangs"
        )

    def read_after(self, sequence: int) -> tuple[int, bytes] | None:
        """Return sequence and binary form of a record with another sequence; None without one.

        For a reader at every step: it does not wait, so a record that is being written or stays
        torn is None, too. Its numbers may be out of range.
        """
        words, word = self._words, self._word
        found = words[word]
        if found == sequence or found & 1:
            return None
        payload = self._payload.tobytes()
        crc = words[word + 1]
        whole = words[word] == found and zlib.crc32(payload, found & _SEED) == crc
        return (found, payload) if whole else None

    def peek(self) -> R | None:
        """Return the last whole record; None if none was written or the section is unreadable."""
        try:
            return self.read()
        except PageUnreadable:
            return None

    def release(self) -> None:
        """Release the view of the mapped memory; the section is not usable afterwards."""
        self._words.release()
        self._payload.release()

    def _decode(self, payload: bytes) -> R:
        try:
            return self._record.unpack(payload)
        except (ValueError, struct.error) as error:
            raise PageUnreadable(f"{self._record.__name__} section: {error}") from error
