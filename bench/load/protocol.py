"""Protocol of the load generator: its configuration, commands and events, and its records.

stdin   {"cmd":"pace","busy":0.4}                         measure the host, set the rate
        {"cmd":"segment","segment":k,"block":b,"arm":a}   play segment k from its start
          optional: "rate_per_s":r, "traffic":"poisson"|"bursty"|"trace"
        {"cmd":"off"}                                     send nothing more
        {"cmd":"quit"}, or end of input                   finish and exit
stdout  {"event":"ready"}  {"event":"paced","request_s","mean_rate_per_s"}
        {"event":"stats","sent","done","errors"}  {"event":"error","message"}

A host request is recorded by its sender and by the host's plugin; `join_requests` joins both.
"""

import math
import random
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from rose.azure_trace import COLUMNS, TracedRequest
from rose.errors import RoseError

MOST_RATE_PER_S = 1_000.0


@dataclass(frozen=True, slots=True)
class LoadShape:
    """A two-state Markov-modulated Poisson load: calm, and bursts `burst_ratio` times as dense.

    Bursts last `burst_s` on average and take `burst_share` of the time. A block that outlasts its
    segment hears it again, so `segment_s` is about as long as a block.
    """

    mean_rate_per_s: float = 4.0
    burst_ratio: float = 6.0
    burst_share: float = 0.2
    burst_s: float = 1.5
    segment_s: float = 15.0
    min_prompt_tokens: int = 8
    max_prompt_tokens: int = 96
    min_output_tokens: int = 4
    max_output_tokens: int = 16

    def __post_init__(self) -> None:
        if not (0 < self.mean_rate_per_s <= MOST_RATE_PER_S and 0 < self.segment_s <= 3_600):
            raise RoseError("a load needs a rate of 0 to 1000 per second and segments up to 1 h")
        if not (self.burst_ratio >= 1 and 0 < self.burst_share < 1 and self.burst_s > 0):
            raise RoseError("bursts need ratio >= 1, a share between 0 and 1, and a duration")
        if not 1 <= self.min_prompt_tokens <= self.max_prompt_tokens:
            raise RoseError("prompt lengths must be 1 <= min <= max")
        if not 1 <= self.min_output_tokens <= self.max_output_tokens:
            raise RoseError("output lengths must be 1 <= min <= max")

    @property
    def calm_rate_per_s(self) -> float:
        """Rate outside bursts that makes the mean rate come out."""
        return self.mean_rate_per_s / (1 - self.burst_share + self.burst_share * self.burst_ratio)

    @property
    def typical_tokens(self) -> tuple[int, int]:
        """(prompt, output) of the middle request."""
        return (
            _middle(self.min_prompt_tokens, self.max_prompt_tokens),
            _middle(self.min_output_tokens, self.max_output_tokens),
        )

    def without_bursts(self) -> "LoadShape":
        """Return the same mean load as a plain Poisson process."""
        return replace(self, burst_ratio=1.0)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One host request; `offset_s` counts from the start of its segment."""

    offset_s: float
    prompt_tokens: int
    output_tokens: int


def _middle(low: int, high: int) -> int:
    return round(math.sqrt(low * high))


def _phases(shape: LoadShape, rng: random.Random) -> Iterator[tuple[float, float]]:
    """Yield (end_s, rate_per_s) of each calm or bursty phase until the segment is full."""
    calm_s = shape.burst_s * (1 - shape.burst_share) / shape.burst_share
    bursting = rng.random() < shape.burst_share
    end_s = 0.0
    while end_s < shape.segment_s:
        end_s += rng.expovariate(1 / (shape.burst_s if bursting else calm_s))
        rate_per_s = shape.calm_rate_per_s * (shape.burst_ratio if bursting else 1)
        yield min(end_s, shape.segment_s), rate_per_s
        bursting = not bursting


def _skewed_length(rng: random.Random, low: int, high: int) -> int:
    """Return a length between low and high: log-normal around their geometric mean."""
    center = (math.log(low) + math.log(high)) / 2
    spread = (math.log(high) - math.log(low)) / 4
    return min(high, max(low, round(rng.lognormvariate(center, spread))))


def generate_segment(shape: LoadShape, seed: int, segment: int) -> tuple[Arrival, ...]:
    """Return segment number `segment` of the bursty load, in order of time."""
    rng = random.Random(f"rose-load/{seed}/{segment}")  # noqa: S311 - a load, not a secret
    arrivals: list[Arrival] = []
    start_s = 0.0
    for end_s, rate_per_s in _phases(shape, rng):
        # Poisson arrivals have no memory, so each phase may start its clock afresh.
        offset_s = start_s + rng.expovariate(rate_per_s)
        while offset_s < end_s:
            prompt = _skewed_length(rng, shape.min_prompt_tokens, shape.max_prompt_tokens)
            output = _skewed_length(rng, shape.min_output_tokens, shape.max_output_tokens)
            arrivals.append(Arrival(round(offset_s, 6), prompt, output))
            offset_s += rng.expovariate(rate_per_s)
        start_s = end_s
    return tuple(arrivals)


def _percentile_95(values: Sequence[int]) -> int:
    return max(1, sorted(values)[min(len(values) - 1, int(0.95 * len(values)))])


def rescale_trace(trace: Sequence[TracedRequest], shape: LoadShape) -> tuple[Arrival, ...]:
    """Return the trace at the shape's mean rate, its lengths brought to what the host serves.

    Time is stretched evenly, so bursts keep their shape. Lengths shrink in proportion, such that
    the trace's 95th percentile becomes the longest allowed; the rest is clipped.
    """
    if len(trace) < 2 or trace[-1].offset_s <= 0:
        raise RoseError("a trace needs two requests at different times")
    stretch = len(trace) / trace[-1].offset_s / shape.mean_rate_per_s
    prompt_scale = shape.max_prompt_tokens / _percentile_95([t.prompt_tokens for t in trace])
    output_scale = shape.max_output_tokens / _percentile_95([t.output_tokens for t in trace])

    def clip(tokens: float, low: int, high: int) -> int:
        return min(high, max(low, round(tokens)))

    return tuple(
        Arrival(
            round(request.offset_s * stretch, 6),
            clip(
                request.prompt_tokens * prompt_scale,
                shape.min_prompt_tokens,
                shape.max_prompt_tokens,
            ),
            clip(
                request.output_tokens * output_scale,
                shape.min_output_tokens,
                shape.max_output_tokens,
            ),
        )
        for request in trace
    )


def trace_segment(
    rescaled: Sequence[Arrival], segment_s: float, segment: int
) -> tuple[Arrival, ...]:
    """Return window number `segment` of a rescaled trace; windows past its end start over."""
    windows = max(1, int(rescaled[-1].offset_s / segment_s))
    start_s = (segment % windows) * segment_s
    first = bisect_left(rescaled, start_s, key=lambda arrival: arrival.offset_s)
    last = bisect_left(rescaled, start_s + segment_s, key=lambda arrival: arrival.offset_s)
    return tuple(
        Arrival(round(a.offset_s - start_s, 6), a.prompt_tokens, a.output_tokens)
        for a in rescaled[first:last]
    )


class ClientRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """`client_requests.jsonl`: a host request as its sender saw it.

    `output_digest` names the tokens of the answer, where the load keeps it.
    """

    request_id: str
    block: int
    arm: str
    segment: int
    offset_s: float
    arrival_s: float
    ttft_s: float | None
    e2e_s: float | None
    output_tokens: int
    status: str
    output_digest: str | None = None


class HostLatency(msgspec.Struct, frozen=True):
    """`host_latency.jsonl`: a host request as the host's plugin measured it."""

    request_id: str
    finished_s: float
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float | None
    prompt_tokens: int
    output_tokens: int


class Request(ClientRequest, frozen=True, omit_defaults=True, kw_only=True):
    """`requests.jsonl`: both joined; the host's figures win."""

    tpot_s: float | None
    prompt_tokens: int | None
    source: Literal["host_plugin", "client"]


def _client_id(engine_id: str, known: set[str]) -> str | None:
    """Return the sender's id inside an engine's `cmpl-ID-0` or `cmpl-ID-0-<hex>`."""
    candidate = engine_id.removeprefix("cmpl-")
    while candidate and candidate not in known:
        candidate, _, _ = candidate.rpartition("-")
    return candidate or None


def _client_tpot_s(request: ClientRequest) -> float | None:
    if request.ttft_s is None or request.e2e_s is None or request.output_tokens < 2:
        return None
    return (request.e2e_s - request.ttft_s) / (request.output_tokens - 1)


def _joined(request: ClientRequest, host: HostLatency | None) -> Request:
    fields = msgspec.structs.asdict(request)
    if host is None:
        return Request(
            **fields, tpot_s=_client_tpot_s(request), prompt_tokens=None, source="client"
        )
    fields |= {"ttft_s": host.ttft_s, "e2e_s": host.e2e_s, "output_tokens": host.output_tokens}
    return Request(
        **fields, tpot_s=host.tpot_s, prompt_tokens=host.prompt_tokens, source="host_plugin"
    )


def join_requests(client: Iterable[ClientRequest], host: Iterable[HostLatency]) -> list[Request]:
    """Return client records with the host's measurements where the host has them, by request id."""
    client = list(client)
    known = {request.request_id for request in client}
    measured = {_client_id(latency.request_id, known): latency for latency in host}
    return [_joined(request, measured.get(request.request_id)) for request in client]


Traffic = Literal["poisson", "bursty", "trace"]


def write_trace(path: Path, seed: int, hours: float, *, day: bool = False) -> None:
    """Write a generated trace in the Azure format, as uneven as the recorded one of code in 2023.

    day: with the shape of a day, from 0:00 on.
    """
    from rose.simulation.workloads.traffic import AZURE_CODE_2023, CODE_DAY, HOUR_S

    traffic = replace(AZURE_CODE_2023, day=CODE_DAY) if day else AZURE_CODE_2023
    began = datetime(2026, 1, 5, tzinfo=UTC)
    with path.open("w", encoding="utf-8") as file:
        file.write(",".join(COLUMNS) + "\n")
        for request in traffic.requests(seed):
            if request.arrival_s > hours * HOUR_S:
                break
            moment = began + timedelta(seconds=request.arrival_s)
            lengths = f"{request.prompt_tokens},{request.output_tokens}"
            file.write(f"{moment:%Y-%m-%d %H:%M:%S.%f},{lengths}\n")


class LoadConfig(BaseModel):
    """The file named by `--config`.

    replay_prompts: a segment has the same prompts in every block. The host must not cache
    prefixes then. digest: keep a digest of every answer's tokens. id_in_body: SGLang takes a
    request's id from there, vLLM from a header.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    model: str
    out: Path
    seed: int = 0
    trace: Path | None = None
    mean_rate_per_s: float = Field(default=4.0, gt=0)
    segment_s: float = Field(default=15.0, gt=0)
    burst_s: float = Field(default=1.5, gt=0)
    min_prompt_tokens: int = Field(default=8, ge=1)
    max_prompt_tokens: int = Field(default=96, ge=8)
    min_output_tokens: int = Field(default=4, ge=1)
    max_output_tokens: int = Field(default=16, ge=4)
    token_ids: tuple[int, int] = (3, 250)
    max_outstanding: int = Field(default=128, ge=1, le=4_096)
    timeout_s: float = Field(default=30.0, gt=0)
    drain_s: float = Field(default=5.0, ge=0)
    replay_prompts: bool = False
    digest: bool = False
    id_in_body: bool = False

    def shape(self, mean_rate_per_s: float | None = None, traffic: Traffic = "bursty") -> LoadShape:
        """Return the load these numbers describe, at another rate if one is given."""
        shape = LoadShape(
            mean_rate_per_s=mean_rate_per_s or self.mean_rate_per_s,
            burst_s=self.burst_s,
            segment_s=self.segment_s,
            min_prompt_tokens=self.min_prompt_tokens,
            max_prompt_tokens=self.max_prompt_tokens,
            min_output_tokens=self.min_output_tokens,
            max_output_tokens=self.max_output_tokens,
        )
        return shape.without_bursts() if traffic == "poisson" else shape


class LoadCommand(msgspec.Struct, frozen=True):
    """A line of stdin. A segment without a rate keeps the last pace; without traffic, its kind."""

    cmd: Literal["pace", "segment", "off", "quit"]
    busy: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.4
    segment: int = 0
    block: int = 0
    arm: str = ""
    rate_per_s: Annotated[float, msgspec.Meta(gt=0, le=1_000)] | None = None
    traffic: Traffic | None = None


class Stats(msgspec.Struct, tag_field="event", tag="stats"):
    """Requests since the start; `errors` counts everything that did not end `ok`."""

    sent: int = 0
    done: int = 0
    errors: int = 0


class Paced(msgspec.Struct, tag_field="event", tag="paced", frozen=True):
    """Result of pacing: seconds that a lone request takes, and the rate that follows."""

    request_s: float
    mean_rate_per_s: float


def make_prompt(
    config: LoadConfig, command: LoadCommand, index: int, prompt_tokens: int
) -> list[int]:
    """Return token ids that differ between blocks, unless the load replays prompts.

    Were they equal, the second arm of a pair would find the first one's prefixes cached.
    """
    block = "" if config.replay_prompts else f"{command.block}/"
    name = f"{config.seed}/{block}{command.segment}/{index}"
    rng = random.Random(name)  # noqa: S311 - a load, not a secret
    return rng.choices(range(*config.token_ids), k=prompt_tokens)
