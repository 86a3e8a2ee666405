"""Stand-in nodes of all kinds around a real scheduler core, for tests of the dashboard.

Of each ten nodes five lend, one of them late against its targets, one is held, one drains, one only
advises, one is matched by no policy, and one fell silent; the last of the fleet left. Figures move
with time, and hang on nothing else.
"""

import asyncio
import math
from collections.abc import Iterator, Mapping

from elastic_scheduler import HarvestMode, Offer, ReplicaKind
from elastic_scheduler.capacity import parse_policy
from rose.dashboard import LeaderInfo, Watch
from rose.rpc import rose_pb2 as pb
from rose.scheduler.core.demand import JobFigures
from rose.scheduler.core.messages import (
    Action,
    Attached,
    Command,
    Demanded,
    Detached,
    Event,
    HarvestSet,
    JobRegistered,
    LogRecord,
    Offered,
    PolicyApplied,
    RatesMeasured,
    Reserve,
    Tick,
    VersionAnnounced,
)
from rose.scheduler.core.observed import Observed
from rose.scheduler.core.scheduler_core import SchedulerCore
from rose.scheduler.persistence import load
from rose.scheduler.service import UNAUDITED, SchedulerService

JOBS = ("grpo", "dapo")
POOLS = ("a", "a", "a", "a", "late", "held", "draining", "advisory", "off", "silent")
POLICIES = (
    '{"name": "serving", "mode": "Active", "nodeSelector": {"matchLabels": {"lends": "yes"}}}',
    '{"name": "held", "mode": "Active", "stopPolicy": "Hold",'
    ' "nodeSelector": {"matchLabels": {"pool": "held"}}}',
    '{"name": "draining", "mode": "Active", "stopPolicy": "HoldAndDrain",'
    ' "nodeSelector": {"matchLabels": {"pool": "draining"}}}',
    '{"name": "first-week", "mode": "Advisory",'
    ' "nodeSelector": {"matchLabels": {"pool": "advisory"}}}',
)
ADVISORY = '{"name": "first-week", "mode": "Advisory"}'
WALL_S = 1_795_000_000.0
GIB = 1 << 30
# Number of GPUs of each host and each guest.
GPUS = 2


class DashboardFleet:
    """The core, its nodes, and the service that a `Watch` asks, all on one hand-turned clock."""

    def __init__(
        self,
        nodes: int = 20,
        names: tuple[str, ...] = (),
        *,
        advisory: bool = False,
        quotas: Mapping[str, str] | None = None,
    ) -> None:
        """`names`: of the first nodes; others are `serving-0001` and so on. advisory: no policy
        lends. quotas: namespaces of placeholder pods, by job.
        """
        self.now_s = 1_000.0
        self.core = SchedulerCore(load({}), HarvestMode.OFF, quotas=quotas)
        self.names = [*names, *(f"serving-{n:04}" for n in range(len(names), nodes))]
        self.pools = [POOLS[n % len(POOLS)] for n in range(nodes)]
        self.stands_by = False
        self.trouble: list[str] = []
        # Epoch and job of each replica's newest lease.
        self._leases: dict[str, tuple[int, str]] = {}
        self._tell = lambda event, fields, by: None
        for policy in (ADVISORY,) if advisory else POLICIES:
            self.act(PolicyApplied(parse_policy(policy)))
        for job in JOBS:
            self.act(JobRegistered(job, 1, model="qwen3-8b"))
            for version in (1, 2):
                self.act(VersionAnnounced(job, version, version - 1, "http://trainer:7000"))
        for number, name in enumerate(self.names):
            pool = self.pools[number]
            labels = {"pool": pool, "rose.dev/deployment": f"chat-{number % 3}"}
            if pool in ("a", "late", "silent"):
                labels["lends"] = "yes"
            self.act(Attached(name, number, labels=labels, takes_caps=True))

    def watch(self, prometheus: str = "") -> Watch:
        """A watch over it."""
        clocks = self._clock, self._wall
        watch = Watch(self._service, self._standing, "prod", *clocks, prometheus=prometheus)
        self._tell = watch.telling(lambda event, fields, by: None)
        return watch

    def play(self, seconds: int = 1) -> "DashboardFleet":
        """Each node reports once a second."""
        for _ in range(seconds):
            for _ in self._second():
                pass
        return self

    async def play_gently(self) -> None:
        """One second, with turns for others on the loop, as reports come one by one."""
        for _ in self._second():
            await asyncio.sleep(0)

    def _second(self) -> Iterator[None]:
        self.now_s += 1.0
        for number, name in enumerate(self.names):
            if self.pools[number] == "silent" and self.now_s > 1_010.0:
                continue
            self.act(Offered(number, tuple(self._offers(number, name))))
            self.act(RatesMeasured(number, self._telemetry(number, name)))
            yield
        figures = tuple(JobFigures(job, 10 * len(self.names), 1e9, 1e5) for job in JOBS)
        self.act(Demanded("gw-0", figures))
        self.act(Tick(self._wall()))

    def leave(self, number: int) -> None:
        """A node is cut off."""
        self.act(Detached(number))

    def set_harvest(self, mode: HarvestMode, by: str = "operator ada") -> None:
        """An operator holds, drains, stops or resumes."""
        self.act(HarvestSet(mode, None, opens=False))
        self._tell("SetHarvestRequest", {"mode": mode.value, "answer": 0}, by)

    def act(self, event: Event) -> None:
        """Step the core, and do what follows at once."""
        actions: list[Action] = list(self.core.step(event, self.now_s))
        for action in actions:  # it grows
            if isinstance(action, Reserve):
                actions += self.core.step(action.then, self.now_s)
            elif isinstance(action, Command) and action.command.HasField("lease"):
                lease = action.command.lease
                self._leases[lease.replica] = lease.epoch, lease.job
            elif isinstance(action, LogRecord) and action.event not in UNAUDITED:
                self._tell(action.event, dict(action.fields), "")

    # ---- what a watch asks ----

    def observed(self, *, budgets: bool = True) -> Observed:
        return self.core.observed(self.now_s, budgets=budgets)

    def troubles(self) -> list[str]:
        return self.trouble

    def _service(self) -> SchedulerService | None:
        return None if self.stands_by else self  # type: ignore[return-value]

    def _standing(self) -> LeaderInfo:
        leader = "10.0.0.2:7400" if self.stands_by else "10.0.0.1:7400"
        return LeaderInfo(leader, "10.0.0.1:7400")

    def _clock(self) -> float:
        return self.now_s

    def _wall(self) -> float:
        return WALL_S + self.now_s

    # ---- what a node says ----

    def _offers(self, number: int, name: str) -> Iterator[Offer]:
        for each in range(2):
            replica = f"{name}/g{each}"
            epoch, job = self._leases.get(replica, (0, JOBS[number % 2]))
            yield Offer(
                replica=replica,
                kind=ReplicaKind.GUEST,
                url="http://127.0.0.1:9000",
                node=name,
                kv_tokens=65_536,
                decode_tok_s=2_000.0,
                prefill_tok_s=20_000.0,
                policy_version=2 if (number + each) % 7 else 1,
                healthy=True,
                ttl_s=3.0,
                epoch=epoch,
                max_sequences=32,
                job=job,
                model="qwen3-8b",
            )

    def _telemetry(self, number: int, name: str) -> pb.Telemetry:
        wave = 0.5 + 0.5 * math.sin(self.now_s / 40 + number)
        ttft_s = (0.55 if self.pools[number] == "late" else 0.2) + 0.1 * wave
        age_s = int(self.now_s - 1_000)
        host = pb.HostTelemetry(
            node=name,
            running=int(20 * wave),
            waiting=int(3 * wave),
            window_requests=200,
            window_s=60.0,
            ttft_p50_s=ttft_s / 2,
            ttft_p95_s=ttft_s,
            tpot_p50_s=0.02,
            tpot_p95_s=0.03 + 0.01 * wave,
            ttft_target_s=0.5,
            tpot_target_s=0.05,
            busy_share=0.2 + 0.4 * wave,
            slo_good=100 * age_s,
            slo_bad=age_s // 20 * (3 if self.pools[number] == "late" else 1),
            source="plugin",
            prompt_tokens=5_000 * age_s,
            output_tokens=1_000 * age_s,
            gpus=GPUS,
        )
        return pb.Telemetry(host=host, guests=list(self._guests(number, name, wave, age_s)))

    def _guests(
        self, number: int, name: str, wave: float, age_s: int
    ) -> Iterator[pb.GuestTelemetry]:
        lends = self.pools[number] in ("a", "late", "silent")
        frozen = lends and (age_s + number) % 23 < 2
        for each in range(2):
            yield pb.GuestTelemetry(
                replica=f"{name}/g{each}",
                mode="freeze" if frozen else "run" if lends else "none",
                reason="host_waits" if frozen else "",
                tokens_total=int(800 * age_s),
                running=8 if lends else 0,
                duty=0.0 if frozen else (1 - 0.5 * wave) * lends,
                policy_version=2,
                ranks=GPUS,
                state="healthy",
                lend_bytes=19 * GIB,
                kv_bytes=int(19 * GIB * (1 - 0.3 * wave)) * lends,
            )
