"""Records of the control page, their binary forms, and the sequence lock that guards each section.

A section in shared memory holds one record and has one writer:

    word 0  sequence: 0 never written, odd while a write is under way, even when whole
    word 1  CRC-32 of the payload, seeded with the sequence
    then    payload

The CRC catches faults that the sequence cannot: a store order other than the one written here, a
second writer by mistake, a payload of another generation. A writer that died leaves an odd
sequence; the next write, by whichever process holds the section then, moves on to a fresh even one.

Times are CLOCK_MONOTONIC nanoseconds, so the processes of one machine can compare them. Zeroed
memory decodes to the harmless value of every record (grant: FREEZE, expired).
"""

import struct
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from math import isfinite
from typing import ClassVar, Generic, Protocol, Self, TypeVar

from executor.errors import PageUnreadable

WORD = 8
HEADER_BYTES = 2 * WORD
SPINS = 8
NAPS = 4
NAP_S = 50e-6
_SEED = 0xFFFFFFFF


class Record(Protocol):
    """A fixed-size record; the dataclasses of `executor.control_page.records` are such."""

    LAYOUT: ClassVar[struct.Struct]

    def pack(self) -> bytes:
        """Binary form of LAYOUT.size bytes."""
        ...

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """Inverse of pack."""
        ...


R = TypeVar("R", bound=Record)


def section_bytes(record: type[Record]) -> int:
    """Bytes that a section of `record` takes, rounded up to a cache line."""
    return -(-(HEADER_BYTES + record.LAYOUT.size) // 64) * 64


class Section(Generic[R]):
    """Typed access to the section that starts at byte `offset` (a multiple of 8) of `view`."""

    __slots__ = ("_bytes", "_end", "_record", "_start", "_word", "_words")

    def __init__(self, view: memoryview, offset: int, record: type[R]) -> None:
        self._bytes = view
        # Aligned native 64-bit stores: a reader sees an old or a new sequence, never half of each.
        self._words = view.cast("Q")
        self._word = offset // WORD
        self._start = offset + HEADER_BYTES
        self._end = self._start + record.LAYOUT.size
        self._record = record

    @property
    def sequence(self) -> int:
        """Raw sequence word; it changes with every write."""
        return self._words[self._word]

    def write(self, record: R) -> None:
        """Publish `record`. Only the section's one writer may call this."""
        self.write_packed(record.pack())

    def write_packed(self, payload: bytes) -> None:
        """Publish a record's binary form, LAYOUT.size bytes; for who writes at every step."""
        words, word = self._words, self._word
        writing = (words[word] + 1) | 1
        words[word] = writing
        self._bytes[self._start : self._end] = payload
        words[word + 1] = zlib.crc32(payload, (writing + 1) & _SEED)
        words[word] = writing + 1

    def read(self) -> R | None:
        """The last whole record, None when nothing was ever written.

        Raises PageUnreadable when no consistent content was seen in a bounded number of tries.
        """
        for attempt in range(SPINS + NAPS):
            if attempt >= SPINS:
                time.sleep(NAP_S)
            before = self._words[self._word]
            if before == 0:
                return None
            if before & 1:
                continue
            payload = bytes(self._bytes[self._start : self._end])
            crc = self._words[self._word + 1]
            if self._words[self._word] == before and zlib.crc32(payload, before & _SEED) == crc:
                return self._decode(payload)
        raise PageUnreadable(
            f"{self._record.__name__} section stays torn: its writer died in a write or hangs"
        )

    def peek(self) -> R | None:
        """Like read, but None also stands for an unreadable section."""
        try:
            return self.read()
        except PageUnreadable:
            return None

    def release(self) -> None:
        """Let go of the mapping."""
        self._words.release()

    def _decode(self, payload: bytes) -> R:
        try:
            return self._record.unpack(payload)
        except (ValueError, struct.error) as error:
            raise PageUnreadable(f"{self._record.__name__} section: {error}") from error


REQUEST_ID_BYTES = 80
REASON_BYTES = 32
MOST_INT = 1 << 62
"""Bound of every number on the page: sums of a few of them still fit the page."""


class GrantMode(IntEnum):
    """What a guest may do; FREEZE is 0 so that empty memory freezes."""

    FREEZE = 0
    RUN = 1
    THROTTLE = 2
    DRAIN = 3
    KILL = 4


def _encode_text(text: str, size: int) -> bytes:
    return text.encode("utf-8")[:size]


def _decode_text(raw: bytes) -> str:
    # Cutting at a byte limit may split a character: dropping the rest of it loses nothing readable.
    return raw.rstrip(b"\0").decode("utf-8", errors="ignore")


def _plausible(values: Iterable[object]) -> None:
    """Raise ValueError for numbers that no writer of the page ever means."""
    for value in values:
        if isinstance(value, int) and not 0 <= value < MOST_INT:
            raise ValueError(f"{value} is out of range")
        if isinstance(value, float) and not isfinite(value):
            raise ValueError(f"{value} is no number")


@dataclass(frozen=True, slots=True)
class HostState:
    """The host's queue and deadlines; a deadline of 0 means that nothing waits for it.

    A host that lends has `granules_total` KV granules, keeps no pages under `granules_lent` of them
    (`bytes_lent`: measured), and lacks `reserve_missing` granules of its reserve: it needs more.
    """

    step_seq: int = 0
    in_step: bool = False
    running: int = 0
    waiting: int = 0
    queued_prefill_tokens: int = 0
    earliest_prefill_deadline_ns: int = 0
    earliest_decode_deadline_ns: int = 0
    kv_used: int = 0
    kv_total: int = 0
    busy_ns: int = 0
    last_step_ns: int = 0
    heartbeat_ns: int = 0
    granules_total: int = 0
    granules_lent: int = 0
    bytes_lent: int = 0
    reserve_missing: int = 0

    LAYOUT: ClassVar[struct.Struct] = struct.Struct("=q?qqqqqqqqqqqqqq")

    @property
    def idle(self) -> bool:
        """No request and no step, at the moment of `heartbeat_ns` and until the next write."""
        return not (self.in_step or self.running or self.waiting)

    def pack(self) -> bytes:
        return self.LAYOUT.pack(
            self.step_seq,
            self.in_step,
            self.running,
            self.waiting,
            self.queued_prefill_tokens,
            self.earliest_prefill_deadline_ns,
            self.earliest_decode_deadline_ns,
            self.kv_used,
            self.kv_total,
            self.busy_ns,
            self.last_step_ns,
            self.heartbeat_ns,
            self.granules_total,
            self.granules_lent,
            self.bytes_lent,
            self.reserve_missing,
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """Inverse of pack. Raises ValueError for numbers out of range."""
        values = cls.LAYOUT.unpack(raw)
        if min(values) < 0 or max(values) >= MOST_INT:
            raise ValueError("a number is out of range")
        return cls(*values)


@dataclass(frozen=True, slots=True)
class SeatState:
    """Who holds the host's seat since `taken_ns`, and when he last said that he lives.

    `pid`, `started` (clock ticks since boot) and `pid_namespace` (its inode) are hints for people
    and for a guard in the same namespace; what counts is the lock.
    """

    pid: int = 0
    started: int = 0
    pid_namespace: int = 0
    taken_ns: int = 0
    beat_ns: int = 0

    LAYOUT: ClassVar[struct.Struct] = struct.Struct("=qqqqq")

    def pack(self) -> bytes:
        return self.LAYOUT.pack(
            self.pid, self.started, self.pid_namespace, self.taken_ns, self.beat_ns
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """Inverse of pack. Raises ValueError for numbers out of range."""
        values = cls.LAYOUT.unpack(raw)
        _plausible(values)
        return cls(*values)


@dataclass(frozen=True, slots=True)
class Grant:
    """What the guest may use until `expiry_ns`; `slack_share` in 0..1, 0 = host-idle time only.

    `kv_granule_cap`: KV granules it may keep pages under; 0 sets no cap. One granule always stays.
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

    LAYOUT: ClassVar[struct.Struct] = struct.Struct(f"=qqqqdqqq{REASON_BYTES}s")

    def pack(self) -> bytes:
        """Binary form; `reason` is cut to REASON_BYTES."""
        return self.LAYOUT.pack(
            self.mode,
            self.token_budget,
            self.max_sequences,
            self.kv_granule_cap,
            self.slack_share,
            self.epoch,
            self.expiry_ns,
            self.heartbeat_ns,
            _encode_text(self.reason, REASON_BYTES),
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """Inverse of pack; raises ValueError for an unknown mode and numbers out of range."""
        values = cls.LAYOUT.unpack(raw)
        _plausible(values)
        grant = cls(GrantMode(values[0]), *values[1:8])
        return replace(grant, reason=_decode_text(values[8]))


@dataclass(frozen=True, slots=True)
class GuestState:
    """What the guest did and holds; `heartbeat_ns` tells that its process lives.

    `bytes_mapped`: KV memory that is not known to have been given back. Of its `granules_total`
    KV granules of `granule_bytes` each the guest keeps pages under `granules_mapped`.
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
    gate_reason: str = ""
    heartbeat_ns: int = 0
    granules_total: int = 0
    granules_mapped: int = 0
    granule_bytes: int = 0

    LAYOUT: ClassVar[struct.Struct] = struct.Struct(f"=q?qqqqqqqqqqqq{REASON_BYTES}s")

    def pack(self) -> bytes:
        """Binary form; `gate_reason` is cut to REASON_BYTES."""
        return self.LAYOUT.pack(
            self.step_seq,
            self.in_step,
            self.last_step_ns,
            self.tokens_total,
            self.running,
            self.waiting,
            self.kv_used,
            self.bytes_mapped,
            self.policy_version,
            self.yielded_ns,
            self.heartbeat_ns,
            self.granules_total,
            self.granules_mapped,
            self.granule_bytes,
            _encode_text(self.gate_reason, REASON_BYTES),
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """Inverse of pack. Raises ValueError for numbers out of range."""
        values = cls.LAYOUT.unpack(raw)
        _plausible(values)
        state = cls(*values[:10])
        return replace(
            state,
            gate_reason=_decode_text(values[14]),
            heartbeat_ns=values[10],
            granules_total=values[11],
            granules_mapped=values[12],
            granule_bytes=values[13],
        )


@dataclass(frozen=True, slots=True)
class LatencyRecord:
    """Latencies of one finished host request; `tpot_ns` is 0 with fewer than two output tokens."""

    request_id: str
    finished_ns: int
    ttft_ns: int
    tpot_ns: int
    e2e_ns: int
    prompt_tokens: int
    output_tokens: int

    LAYOUT: ClassVar[struct.Struct] = struct.Struct(f"={REQUEST_ID_BYTES}sqqqqqq")

    def pack(self) -> bytes:
        """Binary form; `request_id` is cut to REQUEST_ID_BYTES."""
        return self.LAYOUT.pack(
            _encode_text(self.request_id, REQUEST_ID_BYTES),
            self.finished_ns,
            self.ttft_ns,
            self.tpot_ns,
            self.e2e_ns,
            self.prompt_tokens,
            self.output_tokens,
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Self:
        """Inverse of pack. Raises ValueError for numbers out of range."""
        request_id, *numbers = cls.LAYOUT.unpack(raw)
        _plausible(numbers)
        return cls(_decode_text(request_id), *numbers)
