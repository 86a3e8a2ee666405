"""Bodies and lines of the replica HTTP contract (docs/architecture.md)."""

import msgspec

from weight_transfer import OnUpdate

MAX_BODY_BYTES = 4 << 20


class Sampling(msgspec.Struct, frozen=True, gc=False):
    """How to sample; the defaults are those of an unmodified distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None


class GenerateBody(msgspec.Struct, frozen=True, gc=False):
    """Body of `POST /rose/v1/generate`."""

    request_id: str
    token_ids: list[int]
    sampling: Sampling = Sampling()
    cache_salt: str | None = None
    priority: int = 0


class EpochBody(msgspec.Struct, frozen=True):
    """Body of `POST /rose/v1/drain` and `/rose/v1/admit`."""

    epoch: int
    reason: str = ""


class ApplyBody(msgspec.Struct, frozen=True):
    """Body of `POST /rose/v1/weights/apply`: paths on this machine.

    `manifests` of versions that follow each other and are applied at once, or one `manifest`.
    """

    chunks: str
    manifest: str = ""
    manifests: list[str] = []
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
