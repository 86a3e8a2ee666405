"""Stories of the scheduler: tests/traces/scheduler."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from datadriven import nanoseconds, stories, tell

from elastic_scheduler import HarvestMode, ReplicaKind
from elastic_scheduler.capacity import policy_of
from rose.errors import RefusedError
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.messages import (
    Action,
    Activated,
    Answer,
    Attached,
    CloseStream,
    Command,
    Detached,
    Event,
    HarvestSet,
    JobRegistered,
    LogRecord,
    Offered,
    PolicyApplied,
    PolicyDeleted,
    PublishTable,
    ReplicaDrained,
    Reserve,
    RevokeAsked,
    TakenBack,
    Tick,
    VersionAnnounced,
)
from tests.unit.scheduler.core_cases import JOB, CoreBench, offer

Values = dict[str, str]


def _offered(values: Values) -> Offered:
    def kind(replica: str) -> ReplicaKind:
        return ReplicaKind.DEDICATED if replica.startswith("d") else ReplicaKind.GUEST

    offers = (
        offer(
            replica,
            kind=kind(replica),
            healthy="unhealthy" not in values,
            ttl_s=_seconds(values.get("for", "3s")),
            policy_version=int(values.get("version", "0")),
            epoch=int(values.get("epoch", "0")),
        )
        for replica in values["replicas"].split(",")
    )
    return Offered(int(values["stream"]), tuple(offers))


def _policy(values: Values) -> PolicyApplied:
    said: dict[str, object] = {"name": values["policy"], "mode": values["mode"]}
    if "stop" in values:
        said["stopPolicy"] = values["stop"]
    if "slack" in values:
        said["slackShare"] = float(values["slack"])
    if "blackout" in values:
        begin, end = values["blackout"].split("-")
        said["blackoutWindows"] = [{"from": begin, "to": end, "timeZone": "UTC"}]
    return PolicyApplied(policy_of(said))


def _tick(values: Values) -> Tick:
    if "clock" not in values:
        return Tick()
    hours, minutes = values["clock"].split(":")
    return Tick(int(hours) * 3_600.0 + int(minutes) * 60.0)


EVENTS: Final[dict[str, Callable[[Values], Event]]] = {
    "attached": lambda v: Attached(v["node"], int(v["stream"]), takes_caps="caps" in v),
    "detached": lambda v: Detached(int(v["stream"])),
    "offered": _offered,
    "job": lambda v: JobRegistered(JOB, int(v["staleness"])),
    "version": lambda v: VersionAnnounced(JOB, int(v["number"]), int(v["number"]) - 1, "http://t"),
    "activated": lambda v: Activated(
        int(v["stream"]), v["replica"], int(v["version"]), "failed" not in v, "digest"
    ),
    "harvest": lambda v: HarvestSet(HarvestMode(v["mode"]), v.get("replica")),
    "revoke": lambda v: RevokeAsked(v["replica"], v["reason"]),
    "taken-back": lambda v: TakenBack(int(v["stream"]), v["replica"], int(v["epoch"]), v["reason"]),
    "drained": lambda v: ReplicaDrained(int(v["stream"]), v["replica"], int(v["epoch"]), 0),
    "tick": _tick,
    "policy": _policy,
    "deleted": lambda v: PolicyDeleted(v["deleted"]),
}


class Scheduler:
    """`TIME EVENT` with its fields, and `start mode=`: anew from the store.

    `TIME locked` keeps the store from answering, and `TIME unlocked` lets it.
    """

    def __init__(self) -> None:
        self.bench = CoreBench()

    def step(self, verb: str, values: Values) -> Iterator[str]:
        if verb == "start":
            mode = HarvestMode(values.get("mode", "active"))
            self.bench = CoreBench(mode, self.bench.store)
            return
        self.bench.now_s = _seconds(verb)
        what = next(iter(values))
        if what == "locked":
            self.bench.locked = True
        elif what == "unlocked":
            yield from map(_shown, self.bench.unlock())
        else:
            try:
                yield from map(_shown, self.bench.step(EVENTS[what](values)))
            except RefusedError as error:
                yield f'refused "{error}"'

    def status(self) -> str:
        said = self.bench.core.status(self.bench.now_s)
        mode = pb.HarvestMode.Name(said.harvest).removeprefix("HARVEST_MODE_").lower()
        leases = [f"{each.replica}:{each.epoch} {each.state}" for each in said.leases]
        return f"harvest={mode} version={said.latest_version} leases=[{', '.join(leases)}]"


def _shown(action: Action) -> str:
    match action:
        case Command(stream, command):
            return f"Command stream={stream} {_command(command)}"
        case LogRecord(event, known):
            words = (f'{name}="{value}"' if " " in str(value) else f"{name}={value}"
                     for name, value in known.items())  # fmt: skip
            return " ".join(["LogRecord", event, *words])
        case Reserve():
            return f"Reserve replica={action.then.replica} epoch={action.then.epoch}"
        case PublishTable():
            return f"PublishTable {', '.join(map(_row, action.table.replicas)) or 'empty'}"
        case CloseStream():
            return f'CloseStream stream={action.stream} reason="{action.reason}"'
        case Answer():
            return f"Answer {action.value}"


def _row(row: pb.Replica) -> str:
    held = f"leased:{row.lease_epoch}" if row.leased else "free"
    return f"{row.id} {held}{'' if row.healthy else ' unhealthy'}"


def _command(command: pb.NodeCommand) -> str:
    kind = command.WhichOneof("command")
    if kind == "lease":
        lease = command.lease
        return f"lease replica={lease.replica} epoch={lease.epoch} for={lease.ttl_s:g}s"
    if kind == "release":
        release = command.release
        return f'release replica={release.replica} epoch={release.epoch} reason="{release.reason}"'
    if kind == "version":
        return f"version number={command.version.version} url={command.version.url}"
    if kind == "harvest":
        mode = pb.HarvestMode.Name(command.harvest.mode).removeprefix("HARVEST_MODE_").lower()
        return f"harvest mode={mode} replica={command.harvest.replica or 'all'}"
    if kind == "caps":
        said = " ".join(f"{field.name}={value:g}" for field, value in command.caps.ListFields())
        return f"caps {said}"
    return f"relays urls=[{', '.join(command.relays.urls)}]"


def _seconds(text: str) -> float:
    return nanoseconds(text) / 1e9


@pytest.mark.parametrize("story", stories("scheduler"))
def test_the_scheduler_leases_as_the_story_says(story: Path) -> None:
    tell(story, Scheduler())
