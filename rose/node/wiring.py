"""Wiring of a node: assembles the parts of each replica, and the objections to its engine."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from executor import GrantController, GuardConfig, PageUnreadable
from rose.engines import share_of
from rose.logs.eventlog import EventLog, JsonlLog
from rose.node.config import NodeConfig, ReplicaConfig
from rose.node.grants.caps import ToldCaps
from rose.node.grants.guard_thread import GuardThread
from rose.node.guest.cpu_placement import CgroupRefusedError, CpuBoost, guest_cgroup
from rose.node.guest.guest_record import GuestLock
from rose.node.guest.harvest_switch import HarvestSwitch
from rose.node.guest.kill_switch import KILLED, KillSwitch
from rose.node.guest.supervisor import EngineState, HangWatch, Supervisor, SupervisorHooks
from rose.node.hosts.host import Host
from rose.node.reclaimer import GuestMemory, Reclaimer
from rose.node.replica import Replica
from rose.node.telemetry.memory_gauges import DeviceMemory, Gpus, HostMemory, MemoryGauge
from rose.process.launcher import Share

OFF = "harvest is off"
UNTOLD = "no scheduler has spoken"
CUT_OFF = "no scheduler was heard for longer than staleAfter"
OVERDUE = "it keeps KV memory that its host took back"
HOST_BUSY = "its host is busy, and a start runs on the same GPU"


@dataclass(slots=True)
class Wiring:
    """Shared parts of one room: a host and the replicas beside it, or replicas alone.

    config: of the node, as if it had no other host. `guards` and `reclaimers` are the node's, and
    fill as guards are made.
    """

    config: NodeConfig
    events: EventLog
    harvest: HarvestSwitch
    kill_switch: KillSwitch
    samples: JsonlLog
    host: Host | None
    guards: dict[str, GuardThread]
    gpus: Gpus
    caps: ToldCaps
    reclaimers: dict[str, Reclaimer]

    def supervisor_of(self, config: ReplicaConfig) -> Callable[[Replica], Supervisor]:
        """Return the function that makes a replica's supervisor once the replica exists."""
        log = self.config.log_dir / f"engine-{config.id}.log"
        guest = config.kind == "guest"
        cgroup = self._cgroup_of(config) if guest and self.config.cgroup else None
        gpu_env = self.gpus.environment(config)
        spec = config.engine_spec(
            log,
            self.config.host,
            self.config.verify_key,
            cgroup,
            gpu_env,
            self.config.weights,
            self.config.unsigned,
        )
        # A dedicated replica ends with its daemon: it has no gate that would freeze it meanwhile.
        claim = self._claim(config) if guest else None
        return lambda replica: Supervisor(
            spec,
            config.start_timeout_s,
            self.events,
            replica.entered,
            self._rules(replica)
            if guest
            else SupervisorHooks(fits=lambda: self._insist_room(config)),
            claim,
        )

    def guard_of(self, guest: Replica, host: Host, on_broken: Callable[[], None]) -> None:
        """Start the grant loop of a guest. `on_broken` is called when it ends unasked."""
        config = guest.config
        limits = GuardConfig(
            token_budget=config.token_budget,
            max_sequences=config.max_sequences,
            slack_share=config.slack_share,
            pressure=config.pressure,
            kv_base_bytes=config.kv_base_bytes or 0,
        )
        try:
            previous = host.page.grant.read()
        except PageUnreadable:
            previous = None
        in_loop = asyncio.get_running_loop().call_soon_threadsafe
        self.reclaimers[config.id] = self._reclaimer(guest)
        guard = GuardThread(
            config.id,
            host.page,
            GrantController(limits, previous),
            guest.lease_agent.lease_epoch,
            self.kill_switch,
            host.config.pid,
            host.watch,
            self.samples,
            self.events,
            partial(in_loop, on_broken),
            lambda reason: in_loop(guest.lease_agent.take_back, reason),
            CpuBoost(
                lambda: self._healthy_group(guest),
                guest.supervisor.spec.cgroup,
                share_of(guest.supervisor.spec) or "background",
            ),
            lambda owed_bytes: in_loop(self._overdue, guest, owed_bytes),
            lambda: guest.supervisor.warming,
            self.caps,
        )
        self.guards[config.id] = guard
        host.guarded = True
        guard.start()

    def _cgroup_of(self, guest: ReplicaConfig) -> Path | None:
        assert self.config.cgroup
        try:
            share: Share = "background" if guest.device is None else "aside"
            return guest_cgroup(self.config.cgroup, guest.id, share)
        except CgroupRefusedError as error:
            # The guest still runs behind the host as far as the scheduler's classes allow.
            self.events.write("cgroup_refused", replica=guest.id, message=str(error))
            return None

    def _claim(self, config: ReplicaConfig) -> GuestLock:
        return GuestLock(self.config.run_dir, config.id, self.kill_switch.file, config.orphan_s)

    def _reclaimer(self, guest: Replica) -> Reclaimer:
        config = guest.config

        def hold(cap: int | None) -> None:
            self.guards[config.id].hold(cap)

        card = None if config.device is None else self.gpus.card(config.device)

        def gauge() -> MemoryGauge:
            if card is None:
                return HostMemory(lambda: guest.supervisor.pid)
            return DeviceMemory(
                self.gpus.reader,
                card,
                lambda: guest.supervisor.pid,
                lambda: self.guards[config.id].guest,
            )

        return Reclaimer(
            GuestMemory(
                config.id,
                gauge,
                lambda: self.guards[config.id].guest,
                hold,
                lambda: hold(None),
                guest.sleep if config.sleep_mode else None,
                guest.supervisor.restart,
                config.weights_bytes if config.kv_backend == "cuda" else None,
            ),
            self.events,
        )

    def _healthy_group(self, guest: Replica) -> int | None:
        # Until it is healthy the section on the page may be that of an earlier life.
        healthy = guest.supervisor.state is EngineState.HEALTHY
        return guest.supervisor.pid if healthy else None

    def _overdue(self, guest: Replica, owed_bytes: int) -> None:
        if self._healthy_group(guest) is not None:
            config, guard = guest.config, self.guards[guest.config.id]
            self.reclaimers[config.id].begin(
                owed_bytes,
                self.caps.reclaim_s(config.reclaim_s),
                OVERDUE,
                lambda: guard.owed_bytes == 0,
            )

    def _rules(self, guest: Replica) -> SupervisorHooks:
        name = guest.config.id
        hang = HangWatch(
            lambda: guard.guest if (guard := self.guards.get(name)) else None,
            lambda: guest.supervisor.pid,
        )
        return SupervisorHooks(
            must_end=lambda: self._must_end(guest),
            must_wait=lambda: self._must_wait(guest.config),
            hangs=hang.reason,
            fits=lambda: self._insist_room(guest.config),
        )

    def _insist_room(self, config: ReplicaConfig) -> None:
        host = self.config.host if config.kind == "guest" else None
        self.gpus.insist_room(config, host.headroom_bytes if host else 0)

    def _must_wait(self, guest: ReplicaConfig) -> str | None:
        if not self.harvest.known:
            return UNTOLD
        if self.caps.cut_off:
            return CUT_OFF
        reclaimer = self.reclaimers.get(guest.id)
        if reclaimer and reclaimer.holding:
            return reclaimer.holding
        return HOST_BUSY if guest.device is not None and self._host_busy(guest.id) else None

    def _host_busy(self, guest: str) -> bool:
        """Also while nothing is known of it."""
        guard = self.guards.get(guest)
        return guard is None or not guard.host_idle

    def _must_end(self, guest: Replica) -> str | None:
        """Return why the guest must not exist now, else None. The kill switch waits for nothing."""
        if self.kill_switch.engaged:
            return KILLED
        # Without a right to exist it still may finish handing its turns back, within its deadline.
        name = guest.config.id
        if not self.harvest.off(name):
            return None
        late = self.harvest.off_s(name) >= self.caps.reclaim_s(guest.config.reclaim_s)
        return OFF if late or guest.lease_agent.core.status().vacant else None
