"""A guard in this process, and a guest without an engine whose lease lasts until a test ends it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from executor import ControlPage, GrantController, GuardConfig
from rose.logs.eventlog import EventLog, JsonlLog
from rose.logs.rotating_jsonl import LogThread
from rose.node.guest.guard import GuardedHost, GuardThread
from rose.node.guest.kill_switch import KillSwitch
from rose.node.host import HostWatch


@dataclass
class LeasedGuest:
    """Keeps what its guard asked of it; `lease` is asked for the lease's epoch."""

    name: str = "g"
    lease: Callable[[], int | None] = lambda: 1
    warming: bool = False
    ranks: int = 1
    asked: list[object] = field(default_factory=list)
    on_broken: Callable[[], object] = lambda: None

    def lease_epoch(self) -> int | None:
        return self.lease()

    def boost(self, *, on: bool) -> None:
        self.asked.append(on)

    def overdue(self, owed_bytes: int) -> None:
        self.asked.append(owed_bytes)

    def stalled(self, reason: str) -> None:
        self.asked.append(reason)

    def guard_broke(self) -> None:
        self.on_broken()


def guard_thread(
    page: ControlPage,
    folder: Path,
    guest: LeasedGuest | None = None,
    *,
    config: GuardConfig | None = None,
    events: EventLog | None = None,
    samples: JsonlLog | None = None,
    thread: LogThread | None = None,
    **options: Any,
) -> GuardThread:
    """Return a guard of one host's page, with its logs and its kill file in a folder."""
    watch = HostWatch(JsonlLog(folder / "host_latency.jsonl", thread=thread))
    return GuardThread(
        guest or LeasedGuest(),
        GuardedHost(page, watch, options.pop("host_pid", None), options.pop("gpus", 1)),
        GrantController(config or GuardConfig(512, 64)),
        KillSwitch(folder / "KILL"),
        samples or JsonlLog(folder / "guest.jsonl", thread=thread),
        events or EventLog(folder, "n0", thread=thread),
        **options,
    )
