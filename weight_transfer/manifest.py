"""Manifest: what a version consists of, as signed canonical JSON.

Canonical: keys sorted, no white space, ASCII. The signature covers the canonical bytes of
everything but itself. A tensor's chunks are blocks of it, in order of (first row, first column),
and cover it exactly once; a tensor that did not change is listed without chunks. What is not said
has its usual meaning: no `columns` are all of them, no `origin` is where the manifest came from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import Any

from weight_transfer.blocks import Range, tiling_fault
from weight_transfer.errors import ManifestError
from weight_transfer.plain import (
    count_of,
    hex_of,
    list_of,
    object_of,
    range_of,
    seconds_of,
    string_of,
)
from weight_transfer.signing import SigningKey, VerifyKey

CODEC = "fast-1"
"""Name of the chunk format of `chunk` and `codec`."""
_MAX_JSON_BYTES = 64 << 20
_MAX_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """One chunk by name; `rows` is [first, end), `codec` its encoding in lower case.

    `columns`: [first, end) of each row's elements, None for all of them. `origin`: which of the
    manifest's origins has it, None for where the manifest came from.
    """

    id: str
    rows: Range
    codec: str
    encoded_bytes: int
    changed: int
    columns: Range | None = None
    origin: int | None = None


@dataclass(frozen=True, slots=True)
class TensorUpdate:
    """One tensor; digests are 16 hex digits of `digest.digest_of`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest_before: str
    digest_after: str
    chunks: tuple[ChunkRef, ...]


class OnUpdate(StrEnum):
    """What becomes of turns in flight when a version is activated.

    finish_old  they end under the old version first, within a bound; then recompute
    recompute   they go on under the new one, all of their KV computed anew
    keep        they go on under the new one with the KV that they have
    """

    FINISH_OLD = "finish_old"
    RECOMPUTE = "recompute"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Manifest:
    """One published version; times are wall-clock seconds.

    A base, all weights anew, is a version that names itself as its parent: its chunks build on
    zeros. `origins`: addresses of the stores that hold chunks, where they are several.
    `on_update`: what the job wants for its turns in flight.
    """

    job: str
    version: int
    parent: int
    codec: str
    trainer: str
    created_s: float
    expires_s: float
    tensors: tuple[TensorUpdate, ...]
    signature: str = ""
    origins: tuple[str, ...] = ()
    on_update: OnUpdate = OnUpdate.RECOMPUTE

    @property
    def chunks(self) -> tuple[ChunkRef, ...]:
        """All chunks, in tensor order; the same id may occur more than once."""
        return tuple(chunk for tensor in self.tensors for chunk in tensor.chunks)

    @property
    def is_base(self) -> bool:
        """Whether it builds on nothing."""
        return self.parent == self.version

    @property
    def wire_bytes(self) -> int:
        """Encoded bytes that cross a link, each chunk once."""
        return sum({chunk.id: chunk.encoded_bytes for chunk in self.chunks}.values())

    @property
    def changed(self) -> int:
        """Elements that change."""
        return sum(chunk.changed for chunk in self.chunks)

    def signed(self, key: SigningKey) -> Manifest:
        """Return this manifest with `key`'s signature."""
        return replace(self, signature=key.sign(self.canonical()))

    def verify(self, key: VerifyKey) -> None:
        """Raise SignatureError unless `key` signed exactly this."""
        key.verify(self.canonical(), self.signature)

    def canonical(self) -> bytes:
        """Return the bytes that are signed."""
        return _dump({k: v for k, v in self._plain().items() if k != "signature"})

    def to_json(self) -> bytes:
        """Return the whole manifest, canonical."""
        return _dump(self._plain())

    @classmethod
    def from_json(cls, raw: bytes) -> Manifest:
        """Read untrusted JSON; raises ManifestError for anything but a manifest."""
        if len(raw) > _MAX_JSON_BYTES:
            raise ManifestError(f"manifest of {len(raw)} bytes; {_MAX_JSON_BYTES} are allowed")
        try:
            manifest = _manifest(json.loads(raw))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ManifestError(f"not a manifest: {error!r}; fetch it again") from error
        if len({tensor.name for tensor in manifest.tensors}) != len(manifest.tensors):
            raise ManifestError("a tensor is listed twice; fetch the manifest again")
        if any(c.origin >= len(manifest.origins) for c in manifest.chunks if c.origin is not None):
            raise ManifestError("a chunk has an origin that is not listed")
        return manifest

    def _plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        plain["tensors"] = [plain_tensor(tensor) for tensor in self.tensors]
        if not self.origins:
            del plain["origins"]
        if self.on_update is OnUpdate.RECOMPUTE:
            del plain["on_update"]
        return plain


def hex_digest(digest: int) -> str:
    """Return a tensor digest as a manifest writes it."""
    return f"{digest:016x}"


def _dump(plain: Mapping[str, Any]) -> bytes:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def plain_tensor(tensor: TensorUpdate) -> dict[str, Any]:
    """Return a tensor as JSON has it."""
    plain: dict[str, Any] = {name: getattr(tensor, name) for name in tensor.__slots__}
    plain["chunks"] = [plain_chunk(chunk) for chunk in tensor.chunks]
    return plain


def plain_chunk(chunk: ChunkRef) -> dict[str, Any]:
    """Return a chunk as JSON has it."""
    values = ((name, getattr(chunk, name)) for name in chunk.__slots__)
    return {name: value for name, value in values if value is not None}


def check_tiling(tensor: TensorUpdate) -> None:
    """Raise ManifestError unless the chunks cover the tensor once, or say that nothing changed."""
    if not tensor.chunks:
        if tensor.digest_before != tensor.digest_after:
            raise ManifestError(f"{tensor.name}: digests differ and no chunk says how")
        return
    rows, row_elements = (tensor.shape[0] if tensor.shape else 1), prod(tensor.shape[1:])
    every = 0, row_elements
    blocks = ((c.rows, every if c.columns is None else c.columns) for c in tensor.chunks)
    fault = tiling_fault(rows, row_elements, blocks)
    if fault:
        raise ManifestError(f"{tensor.name} {tensor.shape}: chunks do not tile it: {fault}")


def _manifest(value: object) -> Manifest:
    raw = object_of(value)
    return Manifest(
        job=string_of(raw["job"]),
        version=count_of(raw["version"]),
        parent=count_of(raw["parent"]),
        codec=string_of(raw["codec"]),
        trainer=string_of(raw["trainer"]),
        created_s=seconds_of(raw["created_s"]),
        expires_s=seconds_of(raw["expires_s"]),
        tensors=tuple(tensor_update(tensor) for tensor in list_of(raw["tensors"])),
        signature=string_of(raw["signature"]),
        origins=tuple(string_of(url) for url in list_of(raw.get("origins", []))),
        on_update=OnUpdate(string_of(raw.get("on_update", OnUpdate.RECOMPUTE))),
    )


def tensor_update(value: object) -> TensorUpdate:
    """Read one tensor of untrusted JSON; raises TypeError, ValueError, KeyError, ManifestError."""
    raw = object_of(value)
    tensor = TensorUpdate(
        name=string_of(raw["name"]),
        dtype=string_of(raw["dtype"]),
        shape=tuple(count_of(n) for n in list_of(raw["shape"])),
        digest_before=hex_of(raw["digest_before"], 16),
        digest_after=hex_of(raw["digest_after"], 16),
        chunks=tuple(chunk_ref(chunk) for chunk in list_of(raw["chunks"])),
    )
    if len(tensor.shape) > _MAX_DIMENSIONS:
        raise ManifestError(f"{tensor.name} has {len(tensor.shape)} dimensions")
    check_tiling(tensor)
    return tensor


def chunk_ref(value: object) -> ChunkRef:
    """Read one chunk of untrusted JSON; raises TypeError, ValueError, KeyError."""
    raw = object_of(value)
    return ChunkRef(
        id=hex_of(raw["id"], 64),
        rows=range_of(raw["rows"]),
        codec=string_of(raw["codec"]),
        encoded_bytes=count_of(raw["encoded_bytes"]),
        changed=count_of(raw["changed"]),
        columns=range_of(raw["columns"]) if "columns" in raw else None,
        origin=count_of(raw["origin"]) if "origin" in raw else None,
    )
