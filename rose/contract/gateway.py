"""The gateway's own messages, and ROSE's additions to every API of it.

generate   GenerateBody ──► Answer, or with `stream` events: StreamEvent, at last `[DONE]`
           GatewayRefusal with any other status; in a stream it is the last event
abort      NamesBody ──► Aborted
finish     NamesBody ──► SessionFinished
stats      ──► Stats
explain    ──► Explanation, of a request or a session
versions   ──► Versions: the policy version of each replica
health     ──► HealthReport

Request and answer of `generate` are vLLM's; these are the parts that the client uses. All fields,
and the other APIs, are in `rose/gateway/apis`, built on the same structs.
"""

from collections.abc import Iterable
from typing import Final

from msgspec import Struct, field, structs

from elastic_scheduler import Segment, VersionSpan
from rose.contract.fields import TokenId
from rose.contract.replica import Sampling

GENERATE: Final = "/inference/v1/generate"
ABORT: Final = "/inference/v1/abort_requests"
FINISH_SESSION: Final = "/finish_session"
STATS: Final = "/rose/v1/stats"
EXPLAIN: Final = "/rose/v1/explain/"
VERSIONS: Final = "/rose/v1/versions"

# A header overrides the body's field; a body's `timeout_s` and `resume_from` override the header.
SESSION_HEADER: Final = "X-Session-ID"
# Names of the same header at other routers, in order of precedence.
SESSION_ALIASES: Final = ("X-SMG-Routing-Key", "X-Session-Affinity", "X-Correlation-ID")
GROUP_HEADER: Final = "X-Group-ID"
JOB_HEADER: Final = "X-Rose-Job"
REQUEST_ID_HEADER: Final = "X-Request-Id"
TIMEOUT_HEADER: Final = "X-Request-Timeout"
EVENT_ID_HEADER: Final = "Last-Event-ID"

# Names are kept for each of very many trajectories.
MAX_NAME_CHARS: Final = 512
MAX_REQUEST_ID_CHARS: Final = 1_024
MAX_GROUP_SIZE: Final = 4_096
# An event holds one step's tokens; anything near this is not one.
MAX_EVENT_BYTES: Final = 1 << 20
# Statuses of a gateway that is busy: the same turn may be tried at another, or later.
RETRIED: Final = frozenset({429, 502, 503, 504})


class TurnFields(Struct, gc=False, kw_only=True, omit_defaults=True):
    """Fields that the body of every generating route may have besides its API's own.

    Turns of a group are samples of one prompt; `hedges` is how many second copies all `group_size`
    of them may have together. `min_version` and `exact_version` exclude each other. `timeout_s`
    counts from arrival. `resume_from`: number of a broken stream's tokens that the caller has
    already.
    """

    session_id: str | None = None
    group_id: str | None = None
    job: str | None = None
    group_size: int | None = None
    hedges: int | None = None
    stream: bool | None = False
    min_version: int | None = None
    exact_version: int | None = None
    timeout_s: float | None = None
    resume_from: int | None = None


class SamplingParams(Sampling, frozen=True, gc=False):
    """`Sampling` in vLLM's words; `logprobs` 0: the sampled token's and no other's."""

    logprobs: int = 0

    @classmethod
    def of(cls, sampling: Sampling) -> "SamplingParams":
        """Return this sampling in vLLM's words."""
        return cls(*structs.astuple(sampling))


class GatewayGenerateBody(TurnFields, gc=False, kw_only=True, omit_defaults=True):
    """A turn from tokens. The same request id with the same body is the same turn."""

    request_id: str
    token_ids: tuple[TokenId, ...]
    sampling_params: SamplingParams
    priority: int = 0


class Version(Struct, gc=False, omit_defaults=True):
    """Output tokens [start, end) of one policy version, on KV that may be older."""

    version: int
    start: int
    end: int
    oldest_version: int | None = None


def versions_of(spans: Iterable[VersionSpan]) -> list[Version]:
    """Return spans in the form of answers."""
    return [Version(*span) for span in spans]


class TokenLogprob(Struct, gc=False):
    """Logprob of one output token; the token's name beside it is not needed."""

    logprob: float


class Logprobs(Struct, gc=False):
    """One entry a token."""

    content: list[TokenLogprob]


class Choice(Struct, gc=False):
    """The whole output."""

    token_ids: tuple[int, ...]
    logprobs: Logprobs
    finish_reason: str


class TurnAnswer(Struct, gc=False, kw_only=True):
    """A whole turn. Spans and segments are of output tokens [start, end)."""

    versions: list[Version]
    segments: tuple[Segment, ...]
    attempts: int
    request_id: str
    choices: list[Choice]


class StreamChoice(Struct, gc=False):
    """New tokens of a stream, or its end."""

    token_ids: list[int] = []
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class GatewayFault(Struct, frozen=True):
    """Reason for a missing answer; `code` is the HTTP status, even after a stream's 200."""

    message: str = "no reason given"
    type: str = ""
    param: str | None = None
    code: int = 503


class GatewayRefusal(Struct, frozen=True):
    """Body of every answer of vLLM's and OpenAI's routes that is not a 200."""

    error: GatewayFault


class StreamEvent(Struct, gc=False):
    """One `data:` of a stream. Spans count from the first token of this answer."""

    choices: list[StreamChoice] = []
    versions: list[Version] = []
    segments: tuple[Segment, ...] | None = None
    attempts: int = 0
    error: GatewayFault | None = None


class NamesBody(Struct, omit_defaults=True):
    """Turns by their ids, or all of a session; `rid` is SGLang's word for a request id."""

    request_ids: list[str] = field(default_factory=list)
    rid: str | None = None
    session_id: str | None = None
    job: str | None = None


class Aborted(Struct):
    """Request ids of the ended turns."""

    aborted: list[str]


class SessionFinished(Struct):
    """Number of the session's turns that still ran."""

    session_id: str
    aborted: int


class GatewayCounters(Struct):
    """Counters of one gateway; all but `live_turns`, `waiting` and the last two only grow.

    `tokens` and `live_turns` are by replica. `loop_lag_max_s`: greatest recent delay of the event
    loop; `loop_busy_max_s`: the same while it had the processor throughout.
    """

    tokens: dict[str, int]
    live_turns: dict[str, int]
    turns: int
    failed: int
    continuations: int
    attempts: int
    repeated: int
    slow_readers: int
    hedges: int
    hedge_wins: int
    waiting: int
    loop_lag_max_s: float
    loop_busy_max_s: float


class Choosing(Struct):
    """One placement: `replica` is None if the turn had to wait; `weighed` is (id, cost_s).

    `age_s`, not a time: the clock is the gateway's own.
    """

    age_s: float
    request_id: str
    replica: str | None
    why: str
    expected_tokens: int
    is_long: bool
    weighed: tuple[tuple[str, float], ...]


class Explanation(Struct):
    """Recent placements of `subject`'s turns, oldest first."""

    subject: str
    decisions: list[Choosing]


SERVING: Final = "serving"
"""State of a replica that is leased and has caught up with its job: it gets turns."""
SYNCING: Final = "syncing"
"""State of a leased replica that starts, fetches a version, or does not answer."""
IDLE: Final = "idle"
"""State of a replica without a lease."""


class ReplicaVersion(Struct, frozen=True):
    """Version that one replica serves; `version` is None for a stock engine.

    `job` has its lease, "" if none has. `state`: SERVING, SYNCING, IDLE.
    """

    id: str
    kind: str
    job: str
    version: int | None
    state: str


class JobVersion(Struct, frozen=True):
    """The newest version that a job has announced, 0 before the first."""

    job: str
    latest_version: int


class Versions(Struct, frozen=True):
    """The policy version that each replica serves, and the newest of each registered job."""

    jobs: tuple[JobVersion, ...] = ()
    replicas: tuple[ReplicaVersion, ...] = ()

    def latest(self, job: str = "") -> int:
        """Return the newest version of a job, "" for the only one; 0 if it is not registered."""
        return max((each.latest_version for each in self.jobs if job in ("", each.job)), default=0)

    def serving(self, version: int, job: str = "") -> int:
        """Return how many replicas get turns of a job, "" for any, at this or a later version."""
        return sum(
            each.state == SERVING
            and each.version is not None
            and each.version >= version
            and job in ("", each.job)
            for each in self.replicas
        )


class GatewayHealthReport(Struct):
    """Health of the process; `replicas` says whether turns would be placed.

    `status` is `degraded` while there are `troubles`. `unversioned` are stock engines, and what
    they
    are: they stamp no versions and no gate holds them.
    """

    status: str
    troubles: tuple[str, ...]
    log_dropped: int
    replicas: int
    unversioned: dict[str, str]
