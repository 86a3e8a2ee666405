"""Bodies and lines of the replica HTTP contract (docs/architecture.md)."""

from typing import Annotated

import msgspec
from msgspec import Meta

from weight_transfer import OnUpdate

MAX_BODY_BYTES = 4 << 20
MAX_CONTROL_BYTES = 256 << 10

TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Int32 = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Epoch = Annotated[int, Meta(ge=0, le=1 << 53)]
Name = Annotated[str, Meta(max_length=4_096)]


class Sampling(msgspec.Struct, frozen=True, gc=False):
    """How to sample; the defaults are those of an unmodified distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int32 = 0
    max_tokens: Count = 16
    min_tokens: Count = 0
    stop_token_ids: list[TokenId] | None = None
    allowed_token_ids: list[TokenId] | None = None
    seed: Int64 | None = None


class GenerateBody(msgspec.Struct, frozen=True, gc=False):
    """Body of `POST /rose/v1/generate`."""

    request_id: Name
    token_ids: list[TokenId]
    sampling: Sampling = Sampling()
    cache_salt: Name | None = None
    priority: Int32 = 0


class EpochBody(msgspec.Struct, frozen=True):
    """Body of `POST /rose/v1/drain` and `/rose/v1/admit`."""

    epoch: Epoch
    reason: Name = ""


class ApplyBody(msgspec.Struct, frozen=True):
    """Body of `POST /rose/v1/weights/apply`: paths on this machine.

    `manifests` of versions that follow each other and are applied at once, or one `manifest`.
    """

    chunks: Name
    manifest: Name = ""
    manifests: Annotated[list[Name], Meta(max_length=4_096)] = []
    on_update: OnUpdate = OnUpdate.RECOMPUTE

    @property
    def paths(self) -> list[str]:
        """The manifests, in order. Empty when the caller named none."""
        return self.manifests or ([self.manifest] if self.manifest else [])


class Chunk(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A line of a stream: tokens of one policy version with their logprobs.

    `oldest_version` of their KV, where it may be older than `version` (`OnUpdate.KEEP`).
    """

    token_ids: list[int]
    logprobs: list[float]
    version: int
    oldest_version: int | None = None


class Finish(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last line of a stream."""

    finish_reason: str
    message: str | None = None


Record = Chunk | Finish

_ENCODER = msgspec.json.Encoder()


def encode_lines(records: list[Record]) -> bytes:
    """NDJSON, one line a record."""
    return _ENCODER.encode_lines(records)
