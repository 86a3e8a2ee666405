"""Stand-in replicas that switch between jobs, and gateways with each job's demand. Seconds tick."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

from core_cases import CoreBench, offer

from elastic_scheduler import HarvestMode, Offer
from elastic_scheduler.policies.rose import RosePolicy
from rose.scheduler.core.demand import JobFigures, Switched
from rose.scheduler.core.leasing import LeaseTimes
from rose.scheduler.core.messages import (
    Action,
    Command,
    Demanded,
    JobRegistered,
    LogRecord,
    ReplicaDrained,
    VersionAnnounced,
)
from rose.scheduler.core.scheduler_core import SchedulerCore
from rose.scheduler.persistence import load

SWITCH_S = 1.0


class StandinFleet:
    """One node's guests. `served_s`: by job, seconds in which a guest took its turns."""

    def __init__(self, guests: int, jobs: Mapping[str, float], hold_s: float = 10.0) -> None:
        self.bench = CoreBench()
        self.bench.core = SchedulerCore(
            load(self.bench.store.entries),
            HarvestMode.ACTIVE,
            LeaseTimes(5.0, 1.0, 1.0),
            RosePolicy(hold_s),
        )
        for job, weight in jobs.items():
            self.bench.step(JobRegistered(job, 1, weight=weight))
            self.bench.step(VersionAnnounced(job, 1, 0, "http://t"))
        self.bench.attach()
        self.offers = {f"g{n}": offer(f"g{n}", model="m") for n in range(guests)}
        self.ready_s: dict[str, tuple[float, str, int]] = {}
        self.served_s: Counter[str] = Counter()
        self.switches = 0
        self.measured: list[Switched] = []

    def play(self, seconds: float, demand: Callable[[float], tuple[JobFigures, ...]]) -> None:
        """Tick on; `demand` of all jobs at a time since the beginning of this play."""
        for tick in range(int(seconds)):
            self.bench.now_s += 1.0
            self._settle()
            measured, self.measured = tuple(self.measured), []
            self._note(self.bench.step(Demanded("gw", demand(tick), measured)))
            self.bench.offered(*self.offers.values())
            self._note(self.bench.actions)
            for row in self.bench.table.replicas:
                if row.leased and row.healthy:
                    assert row.held_job in ("", row.job)
                    self.served_s[row.job] += 1

    def play_until(self, switches: int, demand: Callable[[float], tuple[JobFigures, ...]]) -> None:
        """Tick on until so many times a guest had changed its job."""
        for _ in range(100 * switches):
            self.play(1, demand)
            if self.switches >= switches:
                return
        raise AssertionError(f"{self.switches} switches only")

    def _settle(self) -> None:
        """Switches that took their time are done."""
        for name, (at_s, job, epoch) in list(self.ready_s.items()):
            if self.bench.now_s >= at_s:
                self.switches += self.offers[name].job not in ("", job)
                self._say(name, job=job, policy_version=1)
                self.measured.append(Switched(name, epoch, SWITCH_S))
                del self.ready_s[name]

    def _say(self, name: str, **changes: object) -> None:
        said: Offer = self.offers[name]
        self.offers[name] = replace(said, **changes)  # type: ignore[arg-type]

    def _note(self, actions: list[Action]) -> None:
        for action in list(actions):
            if isinstance(action, LogRecord) and action.event == "lease_granted":
                name, epoch = str(action.fields["replica"]), int(str(action.fields["epoch"]))
                job = str(action.fields["job"])
                self._say(name, epoch=epoch)
                self.ready_s[name] = (self.bench.now_s + SWITCH_S, job, epoch)
            if isinstance(action, Command) and action.command.HasField("release"):
                told = action.command.release
                self._note(self.bench.step(ReplicaDrained(1, told.replica, told.epoch, 0)))
