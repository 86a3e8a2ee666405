"""Manifest: the parts of a version, as lines of JSON in a signed envelope.

line 1    {"job", "version", "parent", "codec", "trainer", "created_s", "expires_s", "tensors",
          "origins"?, "on_update"?, "adapter"?}; `tensors` is how many lines follow
line 2 …  [name, dtype, shape, digest before, digest after, [chunk, …]], one line for each tensor
chunk     [id, [first row, end], codec, encoded bytes, changed, [first column, end] | null,
          origin | null]
A tensor's chunks are blocks of it, in order of (first row, first column), and cover it exactly
once; a tensor that did not change is listed without chunks. No columns are all of them, no origin
is where the manifest came from.

Whoever reads one may be the process that guards a serving host, and a decoder in C holds the
interpreter's lock for the whole of what it is given. So it is given one line at a time, and a line
is bounded; `MOST_LINE_BYTES` holds 4,000 chunks. What is freed is freed in parts, too. All of it is
bounded for a model of 10^12 weights: 70,000 expert matrices of one chunk each take 17 MiB, twice
that is allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isfinite, prod
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from weight_transfer.errors import ManifestError
from weight_transfer.format.digest import Range, tiling_fault
from weight_transfer.format.signing import (
    HEAD_BYTES,
    Envelope,
    JobKeys,
    Keys,
    Kind,
    SigningKey,
    VerifyKey,
)

CODEC = "fast-1"
"""Name of the chunk format that `chunk` and `delta_codec` write."""
MAX_MANIFEST_BYTES: Final = 32 << 20
MOST_LINE_BYTES: Final = 512 << 10
MOST_TENSORS: Final = 1 << 17
MOST_CHUNKS: Final = 1 << 18
_FREED_AT_ONCE: Final = 256
MALFORMED: Final = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)
"""Exceptions that typed decoding raises for untrusted bytes."""

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Name = Annotated[str, Meta(max_length=1_024)]
Word = Annotated[str, Meta(max_length=32)]
Hex16 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
# These ids become file names.
Hex64 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Shape = Annotated[tuple[Count, ...], Meta(max_length=64)]
Url = Annotated[str, Meta(max_length=2_048)]


class ChunkRef(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Entry of a manifest for one chunk.

    `rows` is [first, end), `codec` its encoding in lower case. `columns`: [first, end) of each
    row's elements, None for all of them. `changed`: number of weights that the chunk changes.
    `origin`: index of the store that serves it in the manifest's origins, None for the server of
    the manifest.
    """

    id: Hex64
    rows: tuple[Count, Count]
    codec: Word
    encoded_bytes: Count
    changed: Count
    columns: tuple[Count, Count] | None = None
    origin: Count | None = None


class TensorUpdate(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Entry of a manifest for one tensor; digests are 16 hex digits of `digest.digest_of`."""

    name: Name
    dtype: Word
    shape: Shape
    digest_before: Hex16
    digest_after: Hex16
    chunks: tuple[ChunkRef, ...]


class OnUpdate(StrEnum):
    """Treatment of turns in flight when a version is activated.

    finish_old  they end under the old version first, within a bound; then recompute
    recompute   they go on under the new one, all of their KV computed anew
    keep        they go on under the new one with the KV that they have
    """

    FINISH_OLD = "finish_old"
    RECOMPUTE = "recompute"
    KEEP = "keep"


class Adapter(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of a LoRA adapter, in PEFT's words; the manifest's tensors are the adapter's alone.

    `base`: `adapter.base_digest` of the checkpoint that it adapts.
    """

    base: Hex64
    r: Annotated[int, Meta(ge=1, le=4_096)]
    lora_alpha: Annotated[float, Meta(gt=0)]
    use_rslora: bool = False


class ManifestHead(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """First line of a manifest: everything but the entries of its tensors, which it counts."""

    job: Name
    version: Count
    parent: Count
    codec: Word
    trainer: Name
    created_s: float
    expires_s: float
    tensors: Annotated[int, Meta(ge=0, le=MOST_TENSORS)]
    origins: Annotated[tuple[Url, ...], Meta(max_length=4_096)] = ()
    on_update: OnUpdate = OnUpdate.RECOMPUTE
    adapter: Adapter | None = None


_read_head = msgspec.json.Decoder(ManifestHead).decode
_read_tensor = msgspec.json.Decoder(TensorUpdate).decode


@dataclass(frozen=True, slots=True)
class Manifest:
    """Signed description of one published version: its chunks by tensor.

    Times are in wall-clock seconds. A base, all weights anew, names itself as its parent, and its
    chunks build on zeros. `origins`: addresses of the stores that hold chunks, where they are
    several. `on_update`: treatment of turns in flight when a replica takes the version. `adapter`:
    settings of the LoRA adapter that the version is, None for whole weights. `signature`: 64 bytes,
    or empty.
    """

    job: str
    version: int
    parent: int
    codec: str
    trainer: str
    created_s: float
    expires_s: float
    tensors: tuple[TensorUpdate, ...]
    signature: bytes = b""
    origins: tuple[str, ...] = ()
    on_update: OnUpdate = OnUpdate.RECOMPUTE
    adapter: Adapter | None = None

    def __del__(self) -> None:
        # A hundred thousand tensors that end with the last reference to their tuple hold the
        # interpreter's lock until the last is gone.
        tensors = list(self.tensors)
        object.__setattr__(self, "tensors", ())
        while tensors:
            del tensors[-_FREED_AT_ONCE:]

    @property
    def chunks(self) -> tuple[ChunkRef, ...]:
        """Entries of all chunks, in tensor order; the same id may occur more than once."""
        return tuple(chunk for tensor in self.tensors for chunk in tensor.chunks)

    @property
    def is_base(self) -> bool:
        """True for a base: a version with all of its weights, which builds on no other."""
        return self.parent == self.version

    @property
    def wire_bytes(self) -> int:
        """Encoded bytes of all chunks, equal chunks counted once."""
        return sum({chunk.id: chunk.encoded_bytes for chunk in self.chunks}.values())

    @property
    def changed(self) -> int:
        return sum(chunk.changed for chunk in self.chunks)

    @property
    def digests(self) -> dict[str, int]:
        """Digest of each tensor in this version, by name."""
        return {tensor.name: int(tensor.digest_after, 16) for tensor in self.tensors}

    def signed(self, key: SigningKey) -> Manifest:
        """Return a copy of this manifest with `key`'s signature.

        Raises ManifestError for a manifest that is larger than readers accept.
        """
        self._check_bounds()
        return replace(self, signature=self._envelope().signed(key).signature)

    def verify(self, key: VerifyKey) -> None:
        """Raise SignatureError unless `key` signed exactly this manifest."""
        self._envelope().verify(key)

    def says_as_much_as(self, other: Manifest) -> bool:
        """Return True if the other manifest differs in times and signature at most."""
        timeless = [
            msgspec.structs.replace(each._head(), created_s=0.0, expires_s=0.0)
            for each in (self, other)
        ]
        if timeless[0] != timeless[1]:
            return False
        # Compare one by one: two tuples compare under the interpreter's lock.
        return all(a == b for a, b in zip(self.tensors, other.tensors, strict=True))

    def to_bytes(self) -> bytes:
        """Return the whole manifest as it is stored and sent: its lines in a signed envelope."""
        return b"".join(self.parts())

    def parts(self) -> Iterator[bytes]:
        """Yield the bytes of `to_bytes` in small parts: joining megabytes holds the
        interpreter's lock."""
        yield Envelope(Kind.MANIFEST, b"", self.signature).to_bytes()
        yield from self._lines()

    @property
    def size(self) -> int:
        """Bytes of the manifest as it is stored and sent."""
        return sum(map(len, self.parts()))

    @classmethod
    def from_bytes(cls, raw: bytes | bytearray, verify_key: VerifyKey | None = None) -> Manifest:
        """Return the manifest in untrusted bytes, which are parsed only after `verify_key` verified
        them.

        Raises ManifestError for anything but a manifest, SignatureError where another key, or none,
        signed it. Without `verify_key` the signature is not checked. Expiry is not checked. It
        holds the interpreter's lock for a line at a time, so that it can run in a thread beside
        urgent work.
        """
        envelope = Envelope.of(raw, Kind.MANIFEST, MAX_MANIFEST_BYTES)
        if verify_key is not None:
            envelope.verify(verify_key)
        lines = _lines(raw)
        head = _head_of(next(lines, b""))
        fields = msgspec.structs.asdict(head) | {"tensors": _tensors(lines, head)}
        manifest = cls(**fields, signature=envelope.signature)
        if len({tensor.name for tensor in manifest.tensors}) != len(manifest.tensors):
            raise ManifestError("a tensor is listed twice; fetch the manifest again")
        return manifest

    def _envelope(self) -> Envelope:
        return Envelope(Kind.MANIFEST, b"".join(self._lines()), self.signature)

    def _lines(self) -> Iterator[bytes]:
        yield msgspec.json.encode(self._head()) + b"\n"
        for tensor in self.tensors:
            yield msgspec.json.encode(tensor) + b"\n"

    def _head(self) -> ManifestHead:
        fields = {name: getattr(self, name) for name in ManifestHead.__struct_fields__}
        return ManifestHead(**fields | {"tensors": len(self.tensors)})

    def _check_bounds(self) -> None:
        chunks = sum(len(tensor.chunks) for tensor in self.tensors)
        lengths = [len(line) for line in self._lines()]
        for what, found, most in (
            ("bytes", HEAD_BYTES + sum(lengths), MAX_MANIFEST_BYTES),
            ("bytes in one line", max(lengths), MOST_LINE_BYTES),
            ("tensors", len(self.tensors), MOST_TENSORS),
            ("chunks", chunks, MOST_CHUNKS),
        ):
            if found > most:
                raise ManifestError(
                    f"version {self.version}: its manifest has {found} {what}, nodes take {most};"
                    " publish in larger chunks"
                )


@dataclass(frozen=True, slots=True)
class VerifiedManifest:
    """A manifest whose signature was checked once, where it entered this process.

    Only `read` and `check` make one. With a key of None no signature is required.
    """

    manifest: Manifest

    @classmethod
    def read(cls, raw: bytes | bytearray, keys: Keys) -> VerifiedManifest:
        """Return the manifest in untrusted bytes, verified by the key of the job that it names.
        Raises like `Manifest.from_bytes`.
        """
        key = keys.of(head_of(raw).job) if isinstance(keys, JobKeys) else keys
        return cls(Manifest.from_bytes(raw, key))

    @classmethod
    def check(cls, manifest: Manifest, verify_key: VerifyKey | None) -> VerifiedManifest:
        """Verify the signature of a parsed manifest, and return it as verified.

        Without a key the signature is not checked. Raises SignatureError.
        """
        if verify_key is not None:
            manifest.verify(verify_key)
        return cls(manifest)


def head_of(raw: bytes | bytearray) -> ManifestHead:
    """Return the first line of a manifest's bytes, with its job, version and expiry.

    The rest is not read. Raises ManifestError. The signature is not checked.
    """
    first = raw[: HEAD_BYTES + MOST_LINE_BYTES + 1]
    Envelope.of(first, Kind.MANIFEST, MAX_MANIFEST_BYTES)
    return _head_of(next(_lines(first), b""))


def hex_digest(digest: int) -> str:
    """Return a tensor digest as 16 hex digits, as a manifest writes it."""
    return f"{digest:016x}"


def check_tiling(tensor: TensorUpdate) -> None:
    """Raise ManifestError unless the tensor's chunks cover it exactly once.

    A tensor without chunks must have equal digests before and after.
    """
    if not tensor.chunks:
        if tensor.digest_before != tensor.digest_after:
            raise ManifestError(f"{tensor.name}: digests differ and no chunk says how")
        return
    rows, row_elements = (tensor.shape[0] if tensor.shape else 1), prod(tensor.shape[1:])
    every = 0, row_elements
    blocks: Iterator[tuple[Range, Range]] = (
        (c.rows, every if c.columns is None else c.columns) for c in tensor.chunks
    )
    fault = tiling_fault(rows, row_elements, blocks)
    if fault:
        raise ManifestError(f"{tensor.name} {tensor.shape}: chunks do not tile it: {fault}")


def _lines(raw: bytes | bytearray) -> Iterator[bytes | bytearray]:
    """Yield the lines of an envelope without their ends. Raises ManifestError for one too long."""
    at = HEAD_BYTES
    while at < len(raw):
        end = raw.find(b"\n", at, at + MOST_LINE_BYTES + 1)
        if end < 0:
            raise ManifestError(
                f"a line of a manifest does not end, or is longer than {MOST_LINE_BYTES} bytes"
            )
        yield raw[at:end]
        at = end + 1


def _head_of(line: bytes | bytearray) -> ManifestHead:
    try:
        head = _read_head(line)
    except MALFORMED as error:
        raise ManifestError(f"not a manifest: {error!s:.200}; fetch it again") from error
    if not (isfinite(head.created_s) and isfinite(head.expires_s)):
        raise ManifestError("a manifest's times are no numbers of seconds; fetch it again")
    return head


def _tensors(lines: Iterator[bytes | bytearray], head: ManifestHead) -> tuple[TensorUpdate, ...]:
    tensors: list[TensorUpdate] = []
    chunks = 0
    for line in lines:
        if len(tensors) == head.tensors:
            raise ManifestError(f"more than the {head.tensors} tensors that its first line says")
        try:
            tensor = _read_tensor(line)
        except MALFORMED as error:
            raise ManifestError(f"not a tensor: {error!s:.200}; fetch it again") from error
        chunks += len(tensor.chunks)
        if chunks > MOST_CHUNKS:
            raise ManifestError(f"a manifest of more than {MOST_CHUNKS} chunks")
        _check_tensor(tensor, len(head.origins))
        tensors.append(tensor)
    if len(tensors) != head.tensors:
        raise ManifestError(f"{len(tensors)} tensors, its first line says {head.tensors}; cut off?")
    return tuple(tensors)


def _check_tensor(tensor: TensorUpdate, origins: int) -> None:
    check_tiling(tensor)
    if any(c.origin is not None and c.origin >= origins for c in tensor.chunks):
        raise ManifestError(f"{tensor.name}: a chunk has an origin that is not listed")
