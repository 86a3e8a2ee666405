"""The gateway's own messages, and ROSE's additions to every API of it.

generate   GenerateBody ──► Answer, or with `stream` events: StreamEvent, at last `[DONE]`
           GatewayRefusal with any other status; in a stream it is the last event
abort      NamesBody ──► Aborted
finish     NamesBody ──► SessionFinished
session    ──► SessionTokens: the kept turns of a session, as tokens
stats      ──► Stats
explain    ──► Explanation, of a request or a session
versions   ──► Versions: the policy version of each replica
health     ──► HealthReport

Request and answer of `generate` are vLLM's; these are the parts that the client uses. All fields,
and the other APIs, are in `rose/gateway/apis`, built on the same structs.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct, field

from elastic_scheduler import Segment, VersionSpan
from rose.contract.fields import Sha256, TokenId
from rose.contract.replica import Sampling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GENERATE: Final = "/inference/v1/generate"
ABORT: Final = "/inference/v1/abort_requests"
FINISH_SESSION: Final = "/finish_session"
STATS: Final = "/rose/v1/stats"
EXPLAIN: Final = "/rose/v1/explain/"
SESSIONS: Final = "/rose/v1/sessions/"
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
# An event holds one step's tokens, the last one of a turn also the experts of all its positions.
MAX_EVENT_BYTES: Final = 64 << 20
# Statuses of a gateway that is busy: the same turn may be tried at another, or later.
RETRIED: Final = frozenset({429, 502, 503, 504})


class TurnFields(Struct, gc=False, kw_only=True, omit_defaults=True):
    """Fields that the request body of every generating route may have besides its API's own.

    The turns of a group are samples of one prompt; `hedges` is the number of second copies that all
    `group_size` of them may have together. `min_version` and `exact_version` exclude each other.
    `timeout_s` counts from arrival. `resume_from`: number of a broken stream's tokens that the
    caller has already, which are not sent again. `routed_experts`: the answer has the experts that
    the model's router chose.
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
    routed_experts: bool | None = False


class ImageName(Struct, frozen=True, gc=False):
    """Name of an image whose bytes were sent before: their hash."""

    sha256: Sha256


class GatewayGenerateBody(TurnFields, gc=False, kw_only=True, omit_defaults=True):
    """Request body of `generate`: a turn from prompt token ids.

    A second request with the same request id and body joins the first one's turn. `packed`: the
    answer has its top logprobs as bytes (`TopLogprobs`). `images`: those in the prompt, in order,
    each as base64 of its file, or by its hash if the job sent the bytes before.
    """

    request_id: str
    token_ids: tuple[TokenId, ...]
    sampling_params: Sampling
    priority: int = 0
    packed: bool = False
    return_token_ids: bool = False
    images: tuple[bytes | ImageName, ...] = ()


class Version(Struct, gc=False, omit_defaults=True):
    """Span of output tokens [start, end) that one policy version sampled.

    `oldest_version`: oldest policy version of the KV that they were sampled on, None if it is the
    same.
    """

    version: int
    start: int
    end: int
    oldest_version: int | None = None


def versions_of(spans: Iterable[VersionSpan]) -> list[Version]:
    """Return the scheduler's version spans as the list of Version that an answer carries."""
    return [Version(*span) for span in spans]


class TokenLogprob(Struct, gc=False):
    """Logprob of one output token; vLLM's other fields beside it are ignored."""

    logprob: float


class Logprobs(Struct, gc=False):
    """Logprobs of the output tokens, one entry for each."""

    content: list[TokenLogprob]


class TopLogprobs(Struct, frozen=True, gc=False):
    """Logprobs of the `most` most likely tokens at each output token, most likely first.

    data: for each output token `most` ids (int32), then as many logprobs (float32), little-endian.
    """

    most: int
    data: bytes

    @property
    def token_ids(self) -> "NDArray[np.int32]":
        """Ids as an array of shape (output tokens, most)."""
        return self._array("ids")

    @property
    def logprobs(self) -> "NDArray[np.float32]":
        """Logprobs as an array of shape (output tokens, most); -inf for tokens that could not be
        sampled.
        """
        return self._array("logprobs")

    def _array(self, name: str) -> "NDArray[Any]":
        import numpy as np

        row = np.dtype([("ids", "<i4", (self.most,)), ("logprobs", "<f4", (self.most,))])
        return np.frombuffer(self.data, row)[name]


class Choice(Struct, gc=False):
    """Whole output of a turn: token ids, logprobs and finish reason."""

    token_ids: tuple[int, ...]
    logprobs: Logprobs
    finish_reason: str
    top_logprobs: TopLogprobs | None = None
    routed_experts: bytes | None = None


class TurnAnswer(Struct, gc=False, kw_only=True):
    """Answer to `generate` without a stream: one turn with its version spans and replica segments.

    Spans and segments are ranges [start, end) of output tokens. `prompt_token_ids`: the prompt with
    the tokens of its images, if `return_token_ids` asks for it.
    """

    versions: list[Version]
    segments: tuple[Segment, ...]
    attempts: int
    request_id: str
    choices: list[Choice]
    prompt_token_ids: tuple[int, ...] | None = None


class StreamChoice(Struct, gc=False):
    """New tokens of a stream; the last one has a finish reason."""

    token_ids: list[int] = []
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    top_logprobs: TopLogprobs | None = None
    routed_experts: bytes | None = None


class GatewayFault(Struct, frozen=True):
    """Error in an answer or stream event: message, type and HTTP status `code`.

    `code` is the status that would have been sent, even in a stream that began with 200. `param`:
    name of the request's field at fault.
    """

    message: str = "no reason given"
    type: str = ""
    param: str | None = None
    code: int = 503


class GatewayRefusal(Struct, frozen=True):
    """Body of every answer of vLLM's and OpenAI's routes that is not a 200: one error."""

    error: GatewayFault


class StreamEvent(Struct, gc=False):
    """One event (`data:` line) of a streamed answer: new tokens, their versions, or an error.

    Spans count tokens from the first one of this answer. `prompt_token_ids`: as in TurnAnswer, in
    the first event.
    """

    choices: list[StreamChoice] = []
    versions: list[Version] = []
    segments: tuple[Segment, ...] | None = None
    attempts: int = 0
    error: GatewayFault | None = None
    prompt_token_ids: tuple[int, ...] | None = None


class NamesBody(Struct, omit_defaults=True):
    """Request body of `abort` and `finish`: turns named by their ids, or all turns of a session.

    `rid` is SGLang's name for a request id.
    """

    request_ids: list[str] = field(default_factory=list)
    rid: str | None = None
    session_id: str | None = None
    job: str | None = None


class Aborted(Struct):
    """Answer to `abort`: request ids of the turns that it ended."""

    aborted: list[str]


class SessionFinished(Struct):
    """Answer to `finish`: the session's id, and how many of its turns still ran and were ended."""

    session_id: str
    aborted: int


class TrajectoryPlace(Struct, frozen=True, omit_defaults=True):
    """Place of a chat turn in its session: number of the trajectory, and of the turn in it.

    `kept_tokens`: leading tokens of the prompt that were kept from earlier turns. `why`: reason for
    which the turn began a trajectory beside the earlier ones.
    """

    index: int
    turn: int
    kept_tokens: int
    why: str = ""


class TrajectoryTurn(Struct, frozen=True):
    """Turn of a trajectory: it sampled the tokens [start, end). `id`: of its answer."""

    id: str
    start: int
    end: int
    finish_reason: str | None


class SessionTrajectory(Struct, frozen=True):
    """Turns of a session that go on from each other, as the tokens that were rendered and sampled.

    `loss_mask` is 1 on sampled tokens. `logprobs`: 0.0 on tokens that were not sampled. `versions`
    and `turns` are spans of `token_ids`. `shared_tokens`: leading tokens that an earlier trajectory
    of the session has too.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[Version, ...]
    turns: tuple[TrajectoryTurn, ...]
    shared_tokens: int


class SessionTokens(Struct, frozen=True):
    """Answer to `session`: its trajectories, in the order in which they began."""

    session_id: str
    trajectories: tuple[SessionTrajectory, ...]


class GatewayCounters(Struct):
    """Counters of one gateway since its start; only `live_turns`, `waiting`, `loop_*` can fall.

    `tokens` and `live_turns` are by replica id. `waiting`: turns not placed yet. `loop_lag_max_s`:
    longest recent delay of the event loop in seconds; `loop_busy_max_s`: the longest during which
    it had the processor throughout.
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
    """Record of one placement decision; `replica` is the chosen id, None if the turn had to wait.

    `weighed`: (replica id, predicted cost in seconds) of the candidates. `age_s`: seconds since the
    decision, since the clock is the gateway's own.
    """

    age_s: float
    request_id: str
    replica: str | None
    why: str
    expected_tokens: int
    is_long: bool
    weighed: tuple[tuple[str, float], ...]


class Explanation(Struct):
    """Answer to `explain`: recent placement decisions for a request or session, oldest first."""

    subject: str
    decisions: list[Choosing]


SERVING: Final = "serving"
"""State of a leased replica that serves its job's version: it gets turns."""
SYNCING: Final = "syncing"
"""State of a leased replica that starts, fetches a version, or does not answer: it gets no turns.
"""
IDLE: Final = "idle"
"""State of a replica without a lease: it gets no turns."""


class ReplicaVersion(Struct, frozen=True):
    """Policy version that one replica serves; `version` is None for a stock engine.

    `job`: the job that leases the replica, "" for none. `state`: SERVING, SYNCING or IDLE.
    """

    id: str
    kind: str
    job: str
    version: int | None
    state: str


class JobVersion(Struct, frozen=True):
    """Newest policy version that a job has announced, 0 before the first."""

    job: str
    latest_version: int


class Versions(Struct, frozen=True):
    """Answer to `versions`: policy version of each replica, and newest of each registered job."""

    jobs: tuple[JobVersion, ...] = ()
    replicas: tuple[ReplicaVersion, ...] = ()

    def latest(self, job: str = "") -> int:
        """Return the newest version that a job has announced; 0 if the job is not registered.

        With job "" return the newest of all jobs.
        """
        return max((each.latest_version for each in self.jobs if job in ("", each.job)), default=0)

    def serving(self, version: int, job: str = "") -> int:
        """Return the number of replicas that get turns and serve `version` or a later one.

        job: count only its replicas; "" counts those of all jobs. Stock engines are not counted.
        """
        return sum(
            each.state == SERVING
            and each.version is not None
            and each.version >= version
            and job in ("", each.job)
            for each in self.replicas
        )


class GatewayHealthReport(Struct):
    """Answer to `health`; `status` is `degraded` while there are `troubles`, one line each.

    `replicas`: number of replicas that turns could be placed on. `log_dropped`: log records lost.
    `unversioned`: stock engines by id with their kind; they report no policy version and obey no
    gate.
    """

    status: str
    troubles: tuple[str, ...]
    log_dropped: int
    replicas: int
    unversioned: dict[str, str]
