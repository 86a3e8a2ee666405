"""What a trainer asks for and what it gets: tokens in, tokens out."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. The defaults leave the policy's distribution as it is, as RL needs it.

    `top_k` 0 is off. `allowed_token_ids` None allows all. Before `min_tokens` no stop is sampled.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens [start, start + len(token_ids)) of a streamed turn, each with its logprob.

    `version` is the policy version that sampled them, -1 where the replica does not say;
    `oldest_version` that of the oldest KV they were sampled on, None where it is the same.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    start: int
    oldest_version: int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One generated turn. Spans are half-open token ranges that cover all tokens in order.

    versions: (policy version, start, end); segments: (replica, kind, start, end). `logprobs` are
    the behaviour policy's, of the distribution that was sampled from. oldest_versions: (oldest
    version of the KV, start, end) of tokens sampled on KV of earlier versions too, as a job that
    updates with `keep` has them: those belong to no version alone. Empty for any other job.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[int, int, int], ...]
    segments: tuple[tuple[str, str, int, int], ...]
    finish_reason: str
    attempts: int
    oldest_versions: tuple[tuple[int, int, int], ...] = ()

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that had a part in any token; None where nobody knows."""
        return min((span[0] for span in (*self.versions, *self.oldest_versions)), default=None)


@dataclass(frozen=True, slots=True)
class Ask:
    """One turn as the trainer wants it; `request_id` stays the same in all tries."""

    request_id: str
    session_id: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    min_version: int | None = None
    exact_version: int | None = None
    priority: int = 0
    group_id: str = ""
    group_size: int = 0
    hedges: int = 0
    job: str = ""

    @property
    def key(self) -> str:
        """What chooses the gateway: a group that may have copies is judged by one gateway."""
        return (self.group_id if self.hedges else "") or self.session_id or self.request_id
