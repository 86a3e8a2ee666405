"""Turn request: one turn in the gateway's own form, from any API.

It holds the tokens, the sampling, and the turn's origin: trajectory, group and job, as the caller
names them.
"""

import secrets
from dataclasses import dataclass, field

import msgspec
from msgspec import structs

from elastic_scheduler import TurnJournal, TurnNeed, prefix_keys
from rose.contract.fields import TOKEN_IDS
from rose.contract.gateway import MAX_REQUEST_ID_CHARS
from rose.contract.replica import MOST_LOGPROBS, Sampling
from rose.gateway.errors import BadRequest
from rose.gateway.text_codec import TextPlan
from rose.images import Image
from rose.tracing import TraceContext

MAX_NUMBER = 1 << 63
_encode = msgspec.msgpack.Encoder().encode


def check_sampling(sampling: Sampling) -> None:
    """Raise BadRequest for sampling parameters outside the range that engines accept."""
    most, least = sampling.max_tokens, sampling.min_tokens
    if most < 1:
        raise BadRequest(f"max_tokens must be at least 1, got {most}", "max_tokens")
    if not 0 <= least <= most:
        raise BadRequest("min_tokens must be between 0 and max_tokens", "min_tokens")
    if not 0 <= sampling.temperature < float("inf"):
        raise BadRequest("temperature must be non-negative", "temperature")
    if not 0 < sampling.top_p <= 1:
        raise BadRequest(f"top_p must be in (0, 1], got {sampling.top_p}", "top_p")
    if sampling.top_k < -1:
        raise BadRequest(f"top_k must be 0 or -1 (off), or at least 1, got {sampling.top_k}")
    if sampling.allowed_token_ids is not None and not sampling.allowed_token_ids:
        raise BadRequest("allowed_token_ids is empty: no token could be sampled")
    if sampling.deterministic and sampling.temperature and sampling.seed is None:
        raise BadRequest(
            "deterministic: without a seed each answer is sampled anew; send a seed, or temperature"
            " 0",
            "deterministic",
        )
    _check_penalties(sampling)
    ids = [*(sampling.stop_token_ids or ()), *(sampling.allowed_token_ids or ())]
    if ids and not 0 <= min(ids) <= max(ids) < TOKEN_IDS:
        raise BadRequest("stop_token_ids and allowed_token_ids are ids of at least 0")


def _check_penalties(sampling: Sampling) -> None:
    if not 0 <= sampling.min_p <= 1:
        raise BadRequest(f"min_p must be in [0, 1], got {sampling.min_p}", "min_p")
    for name in ("frequency_penalty", "presence_penalty"):
        if not -2 <= getattr(sampling, name) <= 2:
            raise BadRequest(f"{name} must be in [-2, 2], got {getattr(sampling, name)}", name)
    if not 0 < sampling.repetition_penalty < float("inf"):
        raise BadRequest(
            f"repetition_penalty must be greater than zero, got {sampling.repetition_penalty}",
            "repetition_penalty",
        )
    most = sampling.prompt_logprobs
    if most is not None and not 0 <= most <= MOST_LOGPROBS:
        raise BadRequest(
            f"prompt_logprobs: from 0 to {MOST_LOGPROBS}, got {most}", "prompt_logprobs"
        )


def sample_of(sampling: Sampling, index: int) -> Sampling:
    """Return the sampling parameters of sample `index` of a prompt: `index` is added to the seed,
    if there is one.
    """
    if sampling.seed is None or index == 0:
        return sampling
    return structs.replace(sampling, seed=sampling.seed + index)


@dataclass(frozen=True, slots=True)
class Origin:
    """Names that a turn's caller gave it; empty ones were not sent. Turns of a group are samples of
    one prompt.

    hedges: how many second copies all `group_size` turns of the group may have together. scope:
    prefix of the caller's names (rose/security/callers.py). trace: trace of the caller's request; a
    repeated request may have another, and is the same turn.
    """

    session: str = ""
    group: str = ""
    job: str = ""
    group_size: int = 0
    hedges: int = 0
    scope: str = ""
    trace: TraceContext | None = field(default=None, compare=False)


ANONYMOUS = Origin()


@dataclass(slots=True, eq=False)
class TurnRequest:
    """One turn as the gateway runs it: prompt token ids, sampling parameters and the caller's
    conditions.

    priority: lower goes first, as in vLLM. timeout_s: from arrival. named: True if the caller chose
    the request id, so it can request the same turn again. text: plan of the output as text, None
    for token ids alone. batch: True for one of several turns that its caller waits for together.
    life: random part of attempt ids, which tells this turn from earlier, failed ones of the same
    id. job: job of the replica's lease, once the turn has a place; `origin.job` may be a label.
    images: those in the prompt, in order.
    """

    request_id: str
    token_ids: list[int]
    sampling: Sampling
    origin: Origin = ANONYMOUS
    min_version: int | None = None
    exact_version: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    timeout_s: float | None = None
    named: bool = False
    text: TextPlan | None = None
    batch: bool = False
    life: str = field(default_factory=lambda: secrets.token_hex(4))
    job: str = ""
    prefix_keys: tuple[int, ...] | None = None
    images: tuple[Image, ...] = ()

    @property
    def name(self) -> str:
        """Name of the turn among all callers': its caller's scope and its request id."""
        return self.origin.scope + self.request_id

    def attempt_id(self, attempt: int) -> str:
        """Return the request id that a replica gets for this attempt; it differs for each attempt,
        as an engine refuses an id that it still knows.

        A turn that was hung up on and requested anew begins with attempt 1 again, so the id also
        has the turn's random part.
        """
        return f"{self.request_id}.{self.life}.{attempt}"

    @property
    def salt(self) -> str | None:
        """Cache salt that a replica gets: the job and the caller's salt, so that jobs share no
        cached blocks; None for none.
        """
        return f"{self.job}/{self.cache_salt or ''}" if self.job else self.cache_salt

    def check(self) -> None:
        """Raise BadRequest for values of the request that its schema cannot check."""
        if len(self.request_id) > MAX_REQUEST_ID_CHARS:
            raise BadRequest(
                f"request_id has {len(self.request_id)} characters: send at most "
                f"{MAX_REQUEST_ID_CHARS}",
                "request_id",
            )
        if not self.token_ids:
            raise BadRequest("the prompt is empty (token_ids is empty): send at least one token")
        if min(self.token_ids) < 0 or max(self.token_ids) >= TOKEN_IDS:
            raise BadRequest("a prompt has token ids of at least 0 and below 2**32", "token_ids")
        if not -MAX_NUMBER <= self.priority < MAX_NUMBER:
            raise BadRequest("priority is a number of 64 bits", "priority")
        for name, version in (("min", self.min_version), ("exact", self.exact_version)):
            if version is not None and version < 0:
                raise BadRequest(f"{name}_version must be at least 0, got {version}")
        if self.min_version is not None and self.exact_version is not None:
            raise BadRequest("min_version and exact_version exclude each other: send one")
        if self.timeout_s is not None and not 0 < self.timeout_s < float("inf"):
            raise BadRequest("a timeout is a number of seconds above 0")
        check_sampling(self.sampling)
        if self.origin.hedges and (
            self.sampling.counts_output or self.sampling.prompt_logprobs is not None
        ):
            raise BadRequest(
                "hedges: a second copy cannot go on from tokens with frequency_penalty, "
                "presence_penalty, prompt_logprobs, structured output or deterministic sampling; "
                "leave out one of them",
                "hedges",
            )

    def journal(self, max_attempts: int) -> TurnJournal:
        """Return an empty journal of the turn's output, for at most `max_attempts` attempts."""
        return TurnJournal(
            self.token_ids,
            self.sampling.max_tokens,
            max_attempts=max_attempts,
            stop_token_ids=self.sampling.stop_token_ids or (),
        )

    def need(self) -> TurnNeed:
        """Return the turn's need for the router: tokens, versions, job, and scoped names."""
        scope, session, group = self.origin.scope, self.origin.session, self.origin.group
        return TurnNeed(
            scope + session if session else "",
            len(self.token_ids),
            self.sampling.max_tokens,
            self.min_version,
            self.exact_version,
            self.name,
            self.origin.job,
            scope + group if group else "",
            prefix_keys=() if session else self._keys(),
        )

    def _keys(self) -> tuple[int, ...]:
        """Return the hashes of the prompt's prefixes, computed once; another scope or salt gives
        other hashes.
        """
        if self.prefix_keys is None:
            salt = f"{self.origin.scope}\n{self.cache_salt or ''}{self._hashes() or ''}"
            self.prefix_keys = prefix_keys(self.token_ids, salt)
        return self.prefix_keys

    def _hashes(self) -> tuple[str, ...]:
        return tuple([image.sha256 for image in self.images])

    def fingerprint(self) -> int:
        """Return a hash that is equal for requests that ask for the same tokens, whatever their
        form of delivery.

        Raises BadRequest for numbers that no replica accepts.
        """
        stop = None if self.text is None else self.text.stop
        asked = (self.token_ids, self.sampling, self.min_version, self.exact_version, stop)
        try:
            return hash(_encode((*asked, self.cache_salt, *self._hashes())))
        except (OverflowError, UnicodeEncodeError) as error:
            raise BadRequest(f"a number or text of the request is out of range: {error}") from error
