"""What the gateway reads and writes: docs/architecture.md, "gateway HTTP" and "replica HTTP"."""

import msgspec

from elastic_scheduler import Deliver, TurnNeed
from rose.gateway.errors import BadRequest

DEFAULT_MAX_TOKENS = 16


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Sampling of one turn. `logprobs` and `n` are known so that vLLM's clients need no change."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    logprobs: int | None = None
    n: int = 1


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Body of `POST /inference/v1/generate`."""

    token_ids: list[int]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    request_id: str = ""
    model: str | None = None
    min_version: int | None = None
    exact_version: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    stream: bool = False

    def check(self) -> None:
        """Raise BadRequest for what the schema alone cannot say."""
        if not self.token_ids:
            raise BadRequest("token_ids is empty: send a prompt of at least one token")
        if self.sampling_params.max_tokens < 1:
            raise BadRequest("max_tokens must be at least 1")
        if not 0 <= self.sampling_params.min_tokens <= self.sampling_params.max_tokens:
            raise BadRequest("min_tokens must be between 0 and max_tokens")
        if self.sampling_params.n != 1:
            raise BadRequest("n must be 1: send one request for each sample")
        if self.stream:
            raise BadRequest("stream must be false: answers of this route are whole")

    def need(self, session: str) -> TurnNeed:
        """What the router has to know of a new turn."""
        return TurnNeed(
            session,
            len(self.token_ids),
            self.sampling_params.max_tokens,
            self.min_version,
            self.exact_version,
            self.request_id,
        )


class ReplicaSampling(msgspec.Struct, gc=False):
    """Sampling as a replica reads it."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: list[int] | None
    allowed_token_ids: list[int] | None
    seed: int | None


class ReplicaRequest(msgspec.Struct, gc=False):
    """Body of a replica's `POST /rose/v1/generate`."""

    request_id: str
    token_ids: list[int]
    sampling: ReplicaSampling
    cache_salt: str | None
    priority: int


class ReplicaLine(msgspec.Struct, gc=False):
    """One line of a replica's answer: tokens of one version, or how the stream ends."""

    token_ids: list[int] = []
    logprobs: list[float] = []
    version: int = -1
    finish_reason: str | None = None
    message: str | None = None


class ReplicaStateReply(msgspec.Struct, gc=False):
    """Answer of a replica's `GET /rose/v1/state`; unknown fields are left alone."""

    policy_version: int
    admitting: bool


class TokenLogprob(msgspec.Struct, gc=False):
    """One token's logprob, in vLLM's spelling of a token id."""

    token: str
    logprob: float


class Logprobs(msgspec.Struct, gc=False):
    """Logprobs of all tokens of a choice."""

    content: list[TokenLogprob]


class Choice(msgspec.Struct, gc=False):
    """The one choice of an answer."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: Logprobs
    finish_reason: str


class Version(msgspec.Struct, gc=False):
    """Output tokens [start, end) of one policy version."""

    version: int
    start: int
    end: int


class AnswerSegment(msgspec.Struct, gc=False):
    """Output tokens [start, end) from one replica."""

    replica: str
    kind: str
    start: int
    end: int


class Answer(msgspec.Struct, gc=False):
    """Body of a 200."""

    request_id: str
    choices: list[Choice]
    versions: list[Version]
    segments: list[AnswerSegment]
    attempts: int


_encode = msgspec.json.Encoder().encode
decode_request = msgspec.json.Decoder(GenerateRequest).decode
decode_line = msgspec.json.Decoder(ReplicaLine).decode
decode_state = msgspec.json.Decoder(ReplicaStateReply).decode


def encode_replica_request(
    request: GenerateRequest, attempt: int, token_ids: list[int], max_tokens: int
) -> bytes:
    """Ask a replica to continue a turn; its request id is unique to the attempt."""
    asked = request.sampling_params
    generated = asked.max_tokens - max_tokens
    sampling = ReplicaSampling(
        asked.temperature,
        asked.top_p,
        asked.top_k,
        max_tokens,
        max(0, asked.min_tokens - generated),
        asked.stop_token_ids,
        asked.allowed_token_ids,
        asked.seed,
    )
    return _encode(
        ReplicaRequest(
            f"{request.request_id}.{attempt}",
            token_ids,
            sampling,
            request.cache_salt,
            request.priority,
        )
    )


def encode_answer(request_id: str, turn: Deliver) -> bytes:
    """The finished turn as the trainer reads it."""
    content = [
        TokenLogprob(f"token_id:{token}", logprob)
        for token, logprob in zip(turn.token_ids, turn.logprobs, strict=True)
    ]
    return _encode(
        Answer(
            request_id,
            [Choice(0, turn.token_ids, Logprobs(content), turn.finish_reason)],
            [Version(span.version, span.start, span.end) for span in turn.versions],
            [AnswerSegment(s.replica, s.kind, s.start, s.end) for s in turn.segments],
            turn.attempts,
        )
    )


def encode_error(kind: str, message: str) -> bytes:
    """Body of any error."""
    return _encode({"error": {"type": kind, "message": message}})
