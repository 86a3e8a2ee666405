"""What a rank tells the coordinator: JSON of a few hundred bytes for each chunk, no weights."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from weight_transfer.errors import ShardError
from weight_transfer.manifest import MALFORMED, ChunkRef, Count, Name, Shape, Word

Spec = tuple[str, tuple[int, ...]]
"""Type and shape of a checkpoint tensor."""


class ShardTensor(Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's blocks of a checkpoint tensor.

    `digest`, mod 2^64: in a report of parts what they add to the tensor's digest; in one of chunks
    what it grows by. Chunks that change nothing are listed, and stored by nobody yet.
    """

    name: Name
    dtype: Word
    shape: Shape
    digest: Annotated[int, Meta(ge=0)]
    chunks: tuple[ChunkRef, ...] = ()

    @property
    def spec(self) -> Spec:
        """What all ranks must agree on."""
        return self.dtype, self.shape


class ShardReport(Struct, frozen=True, forbid_unknown_fields=True):
    """From one rank: chunks of the step from `parent` to `version`, or of all of `version`.

    The latter when both are the same; then, without chunks, it is of parts.
    """

    rank: Count
    version: Count
    parent: Count
    tensors: tuple[ShardTensor, ...]

    def to_json(self) -> bytes:
        """As it is sent."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, raw: bytes) -> ShardReport:
        """Read untrusted bytes; raises ShardError."""
        try:
            return msgspec.json.decode(raw, type=cls)
        except MALFORMED as error:
            raise ShardError(f"not a rank's report: {error!s:.200}") from error
