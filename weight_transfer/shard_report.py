"""What a rank tells the coordinator: JSON of a few hundred bytes for each chunk, no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from weight_transfer.errors import ShardError
from weight_transfer.manifest import ChunkRef, chunk_ref, hex_digest, plain_chunk
from weight_transfer.plain import count_of, hex_of, list_of, object_of, string_of

Spec = tuple[str, tuple[int, ...]]
"""Type and shape of a checkpoint tensor."""


@dataclass(frozen=True, slots=True)
class ShardTensor:
    """One rank's blocks of a checkpoint tensor.

    `digest`, mod 2^64: in a report of parts what they add to the tensor's digest; in one of chunks
    what it grows by. Chunks that change nothing are listed, and stored by nobody yet.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: int
    chunks: tuple[ChunkRef, ...] = ()

    @property
    def spec(self) -> Spec:
        """What all ranks must agree on."""
        return self.dtype, self.shape


@dataclass(frozen=True, slots=True)
class ShardReport:
    """From one rank: chunks of the step from `parent` to `version`, or of all of `version`.

    The latter when both are the same; then, without chunks, it is of parts.
    """

    rank: int
    version: int
    parent: int
    tensors: tuple[ShardTensor, ...]

    def to_json(self) -> bytes:
        """As it is sent."""
        plain: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        plain["tensors"] = [_plain(tensor) for tensor in self.tensors]
        return json.dumps(plain, separators=(",", ":")).encode("ascii")

    @classmethod
    def from_json(cls, raw: bytes) -> ShardReport:
        """Read untrusted bytes; raises ShardError."""
        try:
            plain = object_of(json.loads(raw))
            return cls(
                rank=count_of(plain["rank"]),
                version=count_of(plain["version"]),
                parent=count_of(plain["parent"]),
                tensors=tuple(_tensor(tensor) for tensor in list_of(plain["tensors"])),
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ShardError(f"not a rank's report: {error!r:.200}") from error


def _plain(tensor: ShardTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "digest": hex_digest(tensor.digest),
        "chunks": [plain_chunk(chunk) for chunk in tensor.chunks],
    }


def _tensor(value: object) -> ShardTensor:
    plain = object_of(value)
    return ShardTensor(
        name=string_of(plain["name"]),
        dtype=string_of(plain["dtype"]),
        shape=tuple(count_of(n) for n in list_of(plain["shape"])),
        digest=int(hex_of(plain["digest"], 16), 16),
        chunks=tuple(chunk_ref(chunk) for chunk in list_of(plain["chunks"])),
    )
