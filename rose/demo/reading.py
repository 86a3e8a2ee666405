"""Reading the raw records of a run from its folder."""

from pathlib import Path

import msgspec

from rose.decoding import BAD_BYTES
from rose.demo.records import (
    Activation,
    BlockRecord,
    Event,
    MemorySample,
    Records,
    RunInfo,
    Step,
    Trajectory,
    Turn,
)
from rose.errors import RoseError
from rose.eventlog import read_lines
from rose.load.records import ClientRequest, HostLatency
from rose.node.samples import GUEST_SAMPLES, GuestSample


def _read_run(path: Path) -> RunInfo:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunInfo)
    except OSError as error:
        raise RoseError(f"{path}: cannot be read; name the folder of a demo run") from error
    except BAD_BYTES as error:
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
        guest=read_lines(folder / GUEST_SAMPLES, GuestSample),
        memory=read_lines(memory, MemorySample) if memory.exists() else [],
    )
