"""Fuzz target: what comes over the scheduler's port is taken or refused, and time goes on.

The input is a run of frames: a byte that says which message, two for its length, then its bytes.
"""

import contextlib
from typing import Any, Final

from google.protobuf.message import DecodeError, Message

from elastic_scheduler import HarvestMode
from rose.errors import ConfigError, RefusedError
from rose.rpc import rose_pb2 as pb
from rose.scheduler import SchedulerCore, wire
from rose.scheduler.core.messages import (
    Action,
    Attached,
    Detached,
    Event,
    JobRegistered,
    Reserve,
    Save,
    StoredEvent,
    Tick,
    VersionAnnounced,
)
from rose.scheduler.persistence import load
from tests.fakes.memory_store import InMemoryStore

MAX_FRAMES = 64
STEP_S = 0.25
STREAMS = (1, 2)
# Methods of `rose.scheduler.service`; a node's reports come over one of two streams.
UNARY: tuple[type[Message], ...] = (
    pb.DemandReport,
    pb.RegisterJobRequest,
    pb.AnnounceVersionRequest,
    pb.SetHarvestRequest,
    pb.RevokeRequest,
    pb.ApplyPolicyRequest,
    pb.DeletePolicyRequest,
    pb.RenewRunRequest,
    pb.EndRunRequest,
    pb.DropJobRequest,
    pb.EndJobRequest,
)


class FuzzedScheduler:
    """A core with a job, two nodes and a clock, and a store that is durable at once."""

    def __init__(self) -> None:
        self.store = InMemoryStore()
        self.core = SchedulerCore(load(self.store.entries), HarvestMode.ACTIVE)
        self.now_s = 100.0
        for event in (
            JobRegistered("job", 1),
            VersionAnnounced("job", 1, 0, "http://127.0.0.1:1"),
            *(Attached(f"n{stream}", stream) for stream in STREAMS),
        ):
            self.step(event)

    def step(self, event: Event) -> None:
        """Carry out an event as the service does."""
        if isinstance(event, StoredEvent):
            for write in self.core.writes(event):
                self._write(write.key, write.value)
        actions: list[Action] = self.core.step(event, self.now_s)
        for action in actions:  # it grows
            if isinstance(action, Save):
                self._write(action.write.key, action.write.value)
            if isinstance(action, Reserve):
                self._write(action.write.key, action.write.value)
                actions += self.core.step(action.then, self.now_s)

    def tick(self) -> None:
        """Time passes."""
        self.now_s += STEP_S
        self.step(Tick())

    def look(self) -> None:
        """An operator looks, and what is stored can be read again."""
        self.core.status(self.now_s).SerializeToString()
        load(self.store.entries)

    def _write(self, key: str, value: bytes | None) -> None:
        self.store.write(key, value)


def run_messages(data: bytes) -> None:
    """Feed one input. Raises nothing: what a peer can say wrong is refused inside."""
    scheduler = FuzzedScheduler()
    for kind, frame in _frames(data):
        with contextlib.suppress(ConfigError, RefusedError, DecodeError):
            event = _read(kind, frame)
            if event is not None:
                scheduler.step(event)
        scheduler.tick()
    scheduler.look()
    for stream in STREAMS:
        scheduler.step(Detached(stream))
    scheduler.tick()
    scheduler.look()


def _frames(data: bytes) -> list[tuple[int, bytes]]:
    frames, at = [], 0
    while at + 3 <= len(data) and len(frames) < MAX_FRAMES:
        size = int.from_bytes(data[at + 1 : at + 3], "big")
        frames.append((data[at], data[at + 3 : at + 3 + size]))
        at += 3 + size
    return frames


def _read(kind: int, frame: bytes) -> Event | None:
    number = kind % (len(UNARY) + len(STREAMS))
    if number < len(UNARY):
        return wire.asked(UNARY[number].FromString(frame))
    stream = STREAMS[number - len(UNARY)]
    report = pb.NodeReport.FromString(frame)
    if report.HasField("hello"):
        return wire.attached(report, stream)
    return wire.event_of(report, stream)


def _framed(*messages: tuple[int, Message]) -> bytes:
    raw = [(number, message.SerializeToString()) for number, message in messages]
    return b"".join(bytes([number]) + len(one).to_bytes(2, "big") + one for number, one in raw)


def _report(**fields: Any) -> tuple[int, Message]:
    return len(UNARY), pb.NodeReport(node="n1", **fields)


def _offers(kind: "pb.ReplicaKind.ValueType", **fields: Any) -> tuple[int, Message]:
    offer = pb.Offer(
        replica="g0", kind=kind, url="http://127.0.0.1:2", ttl_s=3.0, healthy=True,
        max_sequences=8, kv_tokens=1_000, decode_tok_s=100.0, prefill_tok_s=1e4, **fields,
    )  # fmt: skip
    return _report(offers=pb.Offers(offers=[offer]))


_DEMAND = pb.DemandReport(
    gateway="gw",
    jobs=[pb.JobDemand(job="job", turns=1_000, owed_tokens=1e6, made_tok_s=100.0)],
    switches=[pb.Switch(replica="g0", epoch=1, took_s=1.5)],
)
SEEDS: Final[dict[str, tuple[bytes, ...]]] = {
    "run_messages": (
        _framed((0, _DEMAND), _offers(pb.REPLICA_KIND_GUEST), (0, _DEMAND)),
        _framed(
            _offers(pb.REPLICA_KIND_DEDICATED),
            (2, pb.AnnounceVersionRequest(job="job", version=2, parent=1, url="http://t")),
            _report(activation=pb.Activation(replica="g0", version=2, ok=True)),
            _report(revocation=pb.Revocation(replica="g0", epoch=1, reason="pressure")),
            _offers(pb.REPLICA_KIND_DEDICATED, epoch=1, policy_version=2),
        ),
        _framed(
            (1, pb.RegisterJobRequest(job="job", max_staleness=2)),
            _report(hello=pb.Hello(protocol=2, cluster="c", relay_url="http://127.0.0.1:3")),
            _report(telemetry=pb.Telemetry(host=pb.HostTelemetry(node="n1", running=4))),
            _offers(pb.REPLICA_KIND_DEDICATED),
            (3, pb.SetHarvestRequest(mode=pb.HARVEST_MODE_HOLD_AND_DRAIN)),
            (4, pb.RevokeRequest(replica="g0", reason="operator")),
            _report(released=pb.Released(replica="g0", epoch=1, aborted=3)),
        ),
    ),
}
