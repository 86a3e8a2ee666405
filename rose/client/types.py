"""Types of the client: settings, requests, sampling, and turns. Tokens in, tokens out.

All are plain values, so that clients travel between processes.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack
from urllib.parse import urlsplit

from rose.client.credentials import NOTHING_SHOWN, GatewayCredentials
from rose.contract.gateway import GatewayGenerateBody, SamplingParams
from rose.contract.replica import Sampling
from rose.errors import ConfigError
from rose.tracing import TraceContext, current_trace, parsed


@dataclass(frozen=True, slots=True)
class Retry:
    """Retry policy of a turn. A try asks every gateway once.

    tries: in a row without a new token. first_s, max_s: the pause after the first try, doubled
    after each, and its bound: 12 tries last 17 s, enough for a gateway to restart.
    """

    tries: int = 12
    first_s: float = 0.1
    max_s: float = 2.0

    def __post_init__(self) -> None:
        if self.tries < 1 or not 0 < self.first_s <= self.max_s:
            raise ConfigError("Retry: tries of at least 1 and 0 < first_s <= max_s")

    def pause_s(self, tried: int) -> float:
        """Return the pause after `tries` tries."""
        return float(min(self.max_s, self.first_s * 2 ** min(tried - 1, 30)))


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """urls: of all gateways. timeout_s: of a turn, all tries together. connect_s: of a connection.
    job: of turns that name none; empty for the only job that the gateways know.

    A gateway that answered no health probe `probes` times in a row, each `probe_s` long, is dead.
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
    """Return one address or several, without trailing slashes."""
    several = [urls] if isinstance(urls, str) else urls
    return tuple([url.rstrip("/") for url in several])


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens [start, start + len(token_ids)) of a streamed turn, each with its logprob.

    `version` is the policy version that sampled them, -1 if the replica does not report it;
    `oldest_version` that of the oldest KV they were sampled on, None if it is the same.
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
    trace_id: of the turn's trace (`traceparent`), as its gateway has it; "" for none.
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

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that had a part in any token; None if unknown."""
        return min((span[0] for span in (*self.versions, *self.oldest_versions)), default=None)


@dataclass(frozen=True, slots=True)
class ClientTurn:
    """One turn of the trainer: its request, and what the headers say; all tries are of one id."""

    body: GatewayGenerateBody
    session_id: str = ""
    trace: TraceContext | None = None

    @property
    def request_id(self) -> str:
        return self.body.request_id

    @property
    def sampling(self) -> SamplingParams:
        return self.body.sampling_params

    @property
    def key(self) -> str:
        """Key that chooses the gateway; all turns of a group with copies go to the same one."""
        group = self.body.group_id if self.body.hedges else None
        return group or self.session_id or self.request_id


class GroupOptions(TypedDict, total=False):
    """min_version, exact_version: accepted policy versions. priority: lower goes first.

    job: of the turn, by the name that its trainer registered; by default the client's `job`.
    traceparent: of the trace that the turn belongs to, in W3C's form; by default that of the
    caller's OpenTelemetry span. A malformed one counts as none.
    """

    min_version: int | None
    exact_version: int | None
    priority: int
    job: str
    traceparent: str


class SessionOptions(GroupOptions, total=False):
    """request_id: of the turn, generated by default; the same id is the same turn."""

    request_id: str


class TurnOptions(SessionOptions, total=False):
    """session_id: the trajectory's, so that the turn goes where its prefix is.

    group_id: of the samples of one prompt, whose lengths predict each other. hedges: how many
    second copies its group_size turns may have together; not for streams.
    """

    session_id: str
    group_id: str
    group_size: int
    hedges: int


def ask_for(
    token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
) -> ClientTurn:
    """Return the turn with all defaults filled in; what is empty is not sent."""
    body = GatewayGenerateBody(
        request_id=options.get("request_id") or uuid.uuid4().hex,
        token_ids=tuple(token_ids),
        sampling_params=SamplingParams.of(sampling),
        priority=options.get("priority", 0),
        min_version=options.get("min_version"),
        exact_version=options.get("exact_version"),
        group_id=options.get("group_id") or None,
        group_size=options.get("group_size") or None,
        hedges=options.get("hedges") or None,
        job=options.get("job") or None,
    )
    named = options.get("traceparent", "")
    trace = parsed(named) if named else current_trace()
    return ClientTurn(body, options.get("session_id", ""), trace)
