"""Types of the client: settings, requests, sampling, and turns. Tokens in, tokens out.

All are plain values, so that clients travel between processes.
"""

import io
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict, Unpack
from urllib.parse import urlsplit

from rose.client.credentials import NOTHING_SHOWN, GatewayCredentials
from rose.contract.gateway import GatewayGenerateBody, TopLogprobs
from rose.contract.replica import Sampling
from rose.errors import ConfigError
from rose.images import Image
from rose.tracing import TraceContext, current_trace, parsed

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry policy of a turn; one try asks every gateway once.

    tries: most tries in a row that bring no new token. first_s: pause in seconds after the first
    try, doubled after each further one up to max_s. The default of 12 tries lasts 17 s, enough for
    a gateway to restart. Raises ConfigError for invalid numbers.
    """

    tries: int = 12
    first_s: float = 0.1
    max_s: float = 2.0

    def __post_init__(self) -> None:
        if self.tries < 1 or not 0 < self.first_s <= self.max_s:
            raise ConfigError("Retry: tries of at least 1 and 0 < first_s <= max_s")

    def pause_s(self, tried: int) -> float:
        """Return the pause in seconds after `tried` tries without an answer."""
        return float(min(self.max_s, self.first_s * 2 ** min(tried - 1, 30)))


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Settings of a client; times in seconds. Raises ConfigError for invalid ones.

    urls: addresses of all gateways. timeout_s: bound on a turn, all tries together. connect_s:
    bound on making a connection. A gateway that answered no health probe `probes` times in a row,
    each within `probe_s`, is dead. job: for turns that name none; empty if the gateways know only
    one.
    """

    urls: tuple[str, ...]
    timeout_s: float = 300.0
    connect_s: float = 5.0
    probe_s: float = 2.0
    probes: int = 3
    retry: Retry = Retry()
    credentials: GatewayCredentials = NOTHING_SHOWN
    job: str = ""

    def __post_init__(self) -> None:
        for url in self.urls:
            if urlsplit(url).scheme not in ("http", "https"):
                raise ConfigError(f"{url!r} is no gateway's address: write http://HOST:PORT")
            self.credentials.check(url)
        if not self.urls or len(set(self.urls)) < len(self.urls):
            raise ConfigError("name at least one gateway, and each of them once")
        if min(self.timeout_s, self.connect_s, self.probe_s, self.probes) <= 0:
            raise ConfigError("timeout_s, connect_s, probe_s, probes: above 0")


def gateway_urls(urls: str | Sequence[str]) -> tuple[str, ...]:
    """Return one address or several as a tuple, without trailing slashes."""
    several = [urls] if isinstance(urls, str) else urls
    return tuple([url.rstrip("/") for url in several])


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens [start, start + len(token_ids)) of a streamed turn, each with its logprob.

    `version`: policy version that sampled the tokens, -1 if the replica does not report it.
    `oldest_version`: oldest policy version of the KV that they were sampled on, None if it is the
    same. `top_logprobs`: the most likely tokens at each token, if `Sampling.logprobs` asks for
    them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    start: int
    oldest_version: int | None = None
    top_logprobs: TopLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One generated turn: output tokens, each with its logprob, and who generated them.

    Spans are half-open token ranges that cover all tokens in order: versions are (policy version,
    start, end), segments (replica, kind, start, end). `logprobs` are those of the distribution that
    was sampled from. `attempts`: placements at a replica. oldest_versions: (oldest version of the
    KV, start, end) of the tokens sampled on KV of earlier versions too, which only a job that
    updates with `keep` has. trace_id: of the turn's OpenTelemetry trace, "" for none. top_logprobs:
    the `Sampling.logprobs` most likely tokens at each token as arrays, None if none are asked for.
    prompt_token_ids: of a turn with images, the prompt with their tokens, as the model's processor
    writes it: with `token_ids` it is the beginning of the next turn's prompt.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[int, int, int], ...]
    segments: tuple[tuple[str, str, int, int], ...]
    finish_reason: str
    attempts: int
    oldest_versions: tuple[tuple[int, int, int], ...] = ()
    trace_id: str = ""
    top_logprobs: TopLogprobs | None = None
    npy: bytes | None = field(default=None, repr=False)
    prompt_token_ids: tuple[int, ...] | None = None

    @property
    def routed_experts(self) -> "NDArray[Any] | None":
        """Experts that the model's router chose, an array of shape (positions, layers, choices):
        each position of prompt and output but the last; None if they were not asked for.
        """
        if self.npy is None:
            return None
        import numpy as np

        found: NDArray[Any] = np.load(io.BytesIO(self.npy), allow_pickle=False)
        return found

    @property
    def oldest_version(self) -> int | None:
        """Oldest policy version that sampled a token or computed its KV; None without versions."""
        return min((span[0] for span in (*self.versions, *self.oldest_versions)), default=None)


@dataclass(frozen=True, slots=True)
class ClientTurn:
    """One turn as the trainer requests it: the request's body, session id, trace context, images.

    All tries of the turn carry the same request id.
    """

    body: GatewayGenerateBody
    session_id: str = ""
    trace: TraceContext | None = None
    images: tuple[Image, ...] = ()

    @property
    def request_id(self) -> str:
        return self.body.request_id

    @property
    def sampling(self) -> Sampling:
        return self.body.sampling_params

    @property
    def key(self) -> str:
        """Key by which the client chooses a gateway: session id, else request id.

        All turns of a group with hedges share the group id as key, so that they go to one gateway.
        """
        group = self.body.group_id if self.body.hedges else None
        return group or self.session_id or self.request_id


class GroupOptions(TypedDict, total=False):
    """Options of every turn, in a group, in a session or alone.

    min_version: oldest accepted policy version; exact_version: the only accepted one; give one of
    them at most. priority: turns of a lower number go first. job: name under which the trainer
    registered, by default the client's `job`. traceparent: W3C header of the trace that the turn
    belongs to, by default that of the caller's OpenTelemetry span; a malformed one counts as none.
    routed_experts: True if the turn is to have the experts that the model's router chose. images:
    files of those in the prompt, in order; each gateway is sent each of them once.
    """

    min_version: int | None
    exact_version: int | None
    priority: int
    job: str
    traceparent: str
    routed_experts: bool
    images: Sequence[bytes]


class SessionOptions(GroupOptions, total=False):
    """Options of a turn in a session. request_id: random by default; equal ids mean one turn."""

    request_id: str


class TurnOptions(SessionOptions, total=False):
    """Options of a turn outside a session.

    session_id: of its trajectory, so that the turn goes to the replica that has its prefix.
    group_id: common to the samples of one prompt, whose lengths predict each other. hedges: number
    of second copies that the `group_size` turns of the group may have together; not for streams.
    """

    session_id: str
    group_id: str
    group_size: int
    hedges: int


def ask_for(
    token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
) -> ClientTurn:
    """Return the request of a turn, with defaults in place of missing options.

    The request id is random unless given. Empty options are not sent.
    """
    body = GatewayGenerateBody(
        request_id=options.get("request_id") or uuid.uuid4().hex,
        token_ids=tuple(token_ids),
        sampling_params=sampling,
        packed=sampling.logprobs > 0,
        priority=options.get("priority", 0),
        min_version=options.get("min_version"),
        exact_version=options.get("exact_version"),
        group_id=options.get("group_id") or None,
        group_size=options.get("group_size") or None,
        hedges=options.get("hedges") or None,
        job=options.get("job") or None,
        routed_experts=options.get("routed_experts", False),
        return_token_ids=bool(options.get("images")),
    )
    named = options.get("traceparent", "")
    trace = parsed(named) if named else current_trace()
    images = tuple([Image.of(data) for data in options.get("images", ())])
    return ClientTurn(body, options.get("session_id", ""), trace, images)
