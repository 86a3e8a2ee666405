"""Reading the raw records of a run from its folder, and joining the two views of a request."""

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

from rose.demo.records import (
    Activation,
    BlockRecord,
    ClientRequest,
    Event,
    GuestSample,
    HostLatency,
    MemorySample,
    Records,
    Request,
    RunInfo,
    Step,
    Trajectory,
    Turn,
)
from rose.errors import RoseError

T = TypeVar("T")


def read_lines(path: Path, schema: type[T]) -> list[T]:
    """The records of one file; a last line that its writer did not finish is left out.

    Raises `RoseError` naming file and line for anything else that is not such a record.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RoseError(
            f"{path}: cannot be read ({error.strerror}); is the run complete?"
        ) from error
    decoder = msgspec.json.Decoder(schema)
    records = []
    # What follows the last newline is empty, or the line a killed process was writing.
    for number, line in enumerate(lines[:-1], 1):
        try:
            records.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise RoseError(f"{path}:{number}: {error}") from error
    return records


def _read_run(path: Path) -> RunInfo:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunInfo)
    except OSError as error:
        raise RoseError(f"{path}: cannot be read; name the folder of a demo run") from error
    except msgspec.DecodeError as error:
        raise RoseError(f"{path}: {error}") from error


def read_records(folder: Path) -> Records:
    """All raw records of the run in `folder`.

    Raises `RoseError` when a file is missing or malformed.
    """
    memory = folder / "memory.jsonl"
    return Records(
        run=_read_run(folder / "run.json"),
        client_requests=read_lines(folder / "client_requests.jsonl", ClientRequest),
        host_latency=read_lines(folder / "host_latency.jsonl", HostLatency),
        turns=read_lines(folder / "turns.jsonl", Turn),
        steps=sorted(read_lines(folder / "steps.jsonl", Step), key=lambda step: step.step),
        trajectories=read_lines(folder / "trajectories.jsonl", Trajectory),
        blocks=sorted(read_lines(folder / "blocks.jsonl", BlockRecord), key=lambda b: b.block),
        activations=read_lines(folder / "activations.jsonl", Activation),
        events=read_lines(folder / "events.jsonl", Event),
        guest=read_lines(folder / "guest.jsonl", GuestSample),
        memory=read_lines(memory, MemorySample) if memory.exists() else [],
    )


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
