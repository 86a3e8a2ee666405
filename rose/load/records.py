"""What is recorded of a host request: by its sender, by the host's plugin, and both joined."""

from collections.abc import Iterable
from typing import Literal

import msgspec


class ClientRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """`client_requests.jsonl`: a host request as its sender saw it.

    `output_digest` names the tokens of the answer, where the load was told to keep it.
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
    """The sender's id inside an engine's: vLLM adds `cmpl-` before it, `-0` or `-0-<hex>` after."""
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
    """Client records with the host's measurements where the host has them, by request id."""
    client = list(client)
    known = {request.request_id for request in client}
    measured = {_client_id(latency.request_id, known): latency for latency in host}
    return [_joined(request, measured.get(request.request_id)) for request in client]
