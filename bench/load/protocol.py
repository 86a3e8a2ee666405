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

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from bench.load.arrivals import LoadShape


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
