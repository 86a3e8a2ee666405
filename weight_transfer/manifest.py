"""Manifest: what a version consists of, as signed canonical JSON.

Canonical: keys sorted, no white space, ASCII. The signature covers the canonical bytes of
everything but itself. A tensor's chunks tile its rows in order; a tensor that did not change
is listed without chunks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

from weight_transfer.errors import ManifestError
from weight_transfer.signing import SigningKey, VerifyKey

CODEC = "fast-1"
"""Name of the chunk format of `chunk` and `codec`."""
_MAX_JSON_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """One chunk by name; `rows` is [first, end), `codec` its encoding in lower case."""

    id: str
    rows: tuple[int, int]
    codec: str
    encoded_bytes: int
    changed: int


@dataclass(frozen=True, slots=True)
class TensorUpdate:
    """One tensor; digests are 16 hex digits of `digest.digest_of`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest_before: str
    digest_after: str
    chunks: tuple[ChunkRef, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """One published version; times are wall-clock seconds.

    A base, all weights anew, is a version that names itself as its parent: its chunks build on
    zeros.
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
        return manifest

    def _plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        plain["tensors"] = [plain_tensor(tensor) for tensor in self.tensors]
        return plain


def hex_digest(digest: int) -> str:
    """Return a tensor digest as a manifest writes it."""
    return f"{digest:016x}"


def _dump(plain: Mapping[str, Any]) -> bytes:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def plain_tensor(tensor: TensorUpdate) -> dict[str, Any]:
    """Return a tensor as JSON has it."""
    plain: dict[str, Any] = {name: getattr(tensor, name) for name in tensor.__slots__}
    plain["chunks"] = [{n: getattr(c, n) for n in c.__slots__} for c in tensor.chunks]
    return plain


def _check_tiling(tensor: TensorUpdate) -> None:
    at = 0
    for chunk in tensor.chunks:
        if chunk.rows[0] != at or chunk.rows[1] <= at:
            raise ManifestError(f"{tensor.name}: chunks do not tile its rows at row {at}")
        at = chunk.rows[1]
    if tensor.chunks and at != (tensor.shape[0] if tensor.shape else 1):
        raise ManifestError(f"{tensor.name}: chunks end at row {at} of shape {tensor.shape}")
    if not tensor.chunks and tensor.digest_before != tensor.digest_after:
        raise ManifestError(f"{tensor.name}: digests differ and no chunk says how")


def _manifest(value: object) -> Manifest:
    raw = _dict(value)
    return Manifest(
        job=_str(raw["job"]),
        version=_int(raw["version"]),
        parent=_int(raw["parent"]),
        codec=_str(raw["codec"]),
        trainer=_str(raw["trainer"]),
        created_s=_number(raw["created_s"]),
        expires_s=_number(raw["expires_s"]),
        tensors=tuple(tensor_update(tensor) for tensor in _list(raw["tensors"])),
        signature=_str(raw["signature"]),
    )


def tensor_update(value: object) -> TensorUpdate:
    """Read one tensor of untrusted JSON; raises TypeError, ValueError, KeyError, ManifestError."""
    raw = _dict(value)
    tensor = TensorUpdate(
        name=_str(raw["name"]),
        dtype=_str(raw["dtype"]),
        shape=tuple(_int(n) for n in _list(raw["shape"])),
        digest_before=_hex(raw["digest_before"], 16),
        digest_after=_hex(raw["digest_after"], 16),
        chunks=tuple(_chunk(chunk) for chunk in _list(raw["chunks"])),
    )
    _check_tiling(tensor)
    return tensor


def _chunk(value: object) -> ChunkRef:
    raw = _dict(value)
    first, end = _list(raw["rows"])
    return ChunkRef(
        id=_hex(raw["id"], 64),
        rows=(_int(first), _int(end)),
        codec=_str(raw["codec"]),
        encoded_bytes=_int(raw["encoded_bytes"]),
        changed=_int(raw["changed"]),
    )


def _dict(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r:.80} is not an object")
    return value


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r:.80} is not a list")
    return value


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.80} is not a string")
    return value


def _int(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise TypeError(f"{value!r:.80} is not a count")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise TypeError(f"{value!r:.80} is not a number of seconds")
    return value


def _hex(value: object, digits: int) -> str:
    # Ids become file names: nothing but lower-case hex may pass.
    text = _str(value)
    if len(text) != digits or not set(text) <= set("0123456789abcdef"):
        raise ValueError(f"{text!r:.80} is not {digits} hex digits")
    return text
