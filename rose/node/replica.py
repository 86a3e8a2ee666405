"""Replicas of a node: engine, lease agent and policy version; of a guest its guard besides.

`build_reports` makes reports to the scheduler of them, `view_of` the figures of `/metrics`.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from executor import GrantController, GuardConfig, GuestState, PageUnreadable
from rose.engines import share_of
from rose.errors import RefusedError
from rose.logs.eventlog import EventLog, JsonlLog
from rose.node.config import NodeConfig, ReplicaConfig
from rose.node.guest.cpu_placement import CgroupRefusedError, CpuBoost, guest_cgroup
from rose.node.guest.guard import GuardedHost, GuardThread
from rose.node.guest.guest_record import GuestLock
from rose.node.guest.kill_switch import KILLED, Measured, StopProof
from rose.node.guest.memory_gauges import DeviceMemory, Gpus, HeldMemory, HostMemory, MemoryGauge
from rose.node.guest.reclaimer import Reclaimer
from rose.node.guest.supervisor import EngineState, HangWatch, Supervisor
from rose.node.host import Host, summed
from rose.node.lease import (
    Ended,
    EngineDown,
    EngineUp,
    LeaseAgent,
    LeaseTakenBack,
    Revoked,
    SwitchBegun,
)
from rose.node.metrics import ReplicaFigures, ReplicaPoller
from rose.node.orders import Orders
from rose.node.proxy_process import ProxyProcess
from rose.node.replica_client import ReplicaClient
from rose.node.scheduler_session import SchedulerSession
from rose.node.weight_updates import Updates, WeightSource
from rose.process.background_tasks import Background
from rose.process.launcher import Share
from rose.process.procfs import exposed_at
from rose.rpc import rose_pb2

DRAIN_PATIENCE_S = 2.0
END_PATIENCE_S = 10.0
OFF = "harvest is off"
UNTOLD = "no scheduler has spoken"
CUT_OFF = "no scheduler was heard for longer than staleAfter"
OVERDUE = "it keeps KV memory that its host took back"
HOST_BUSY = "its host is busy, and a start runs on the same GPU"
OFFER_TTL_S = 3.0
_KINDS = {
    "guest": rose_pb2.REPLICA_KIND_GUEST,
    "dedicated": rose_pb2.REPLICA_KIND_DEDICATED,
}


@dataclass(frozen=True, slots=True)
class NodeLogs:
    """Logs of a node: events, samples of guests' grants, and activations of weight versions."""

    events: EventLog
    samples: JsonlLog
    activations: JsonlLog


@dataclass(frozen=True, slots=True)
class NodeParts:
    """Objects of a node that all its replicas share.

    config: the node's configuration with the one host that these replicas are beside, or none.
    guard_broke: event that is set when a guard thread ends without being stopped.
    """

    config: NodeConfig
    logs: NodeLogs
    orders: Orders
    gpus: Gpus
    source: WeightSource
    session: SchedulerSession
    proxy: ProxyProcess | None
    guard_broke: asyncio.Event


class Replica:
    """One replica of a node: it connects the engine's supervisor, lease agent and weight updates,
    and serves as their owner (`EngineOwner`, `UpdateOwner`).

    url: URL to which gateways send the replica's turns.
    """

    host: Host | None = None
    guard: GuardThread | None = None
    reclaimer: Reclaimer | None = None

    def __init__(self, config: ReplicaConfig, parts: NodeParts, offer: int = 0) -> None:
        self.config = config
        self.further: list[FurtherOffer] = []
        self.url = parts.config.offered_url(config)
        self._parts = parts
        self._events = events = parts.logs.events
        self._session, self._proxy = parts.session, parts.proxy
        own = f"http://127.0.0.1:{config.port}"
        self._client = client = ReplicaClient(
            parts.source.session, own, lambda: self.supervisor.headers, offer
        )
        self.lease_agent = LeaseAgent(config.id, client, events, self._lease_told, self._broken)
        self.updates = Updates(
            config.id, config.kind, client, parts.source, parts.logs.activations, events, self
        )
        self.poller = ReplicaPoller(client, lambda: self.offered)
        self._trusted = True
        self.model = config.model_name
        self._wanted_model = self._started_model = config.model_name
        gpu_env = parts.gpus.environment(config)
        spec = config.engine_spec(parts.config, self._cgroup(), gpu_env)
        self.supervisor = Supervisor(spec, config.start_timeout_s, events, self, self._claim())

    @property
    def near(self) -> list[str]:
        """Names of the replica's other models that have the running model's architecture, so that a
        weight update switches to them without a restart.
        """
        folders = self.config.folders
        here = folders[self.model]
        others = (name for name in folders if name != self.model)
        return [name for name in others if same_architecture(here, folders[name])]

    @property
    def offered(self) -> bool:
        """True if the replica may be leased: its engine is healthy and trusted, and the node's
        proxy, if any, listens. Weights may be old: turns come once they are updated.
        """
        healthy = self.supervisor.state is EngineState.HEALTHY
        reachable = self._proxy is None or self._proxy.listens
        return self._trusted and healthy and reachable

    def lease(self, lease: rose_pb2.Lease, ttl_s: float) -> None:
        """Apply a lease or its renewal for `ttl_s` seconds, and begin to bring the engine to its
        job's model and weights. Raises RefusedError for a model that the replica has no folder of.
        """
        model = lease.model or self.config.model_name
        if model not in self.config.folders:
            raise RefusedError(
                f"{lease.replica} was leased for model {model!r}, which it has no folder of;"
                " add it to the replica's `models`"
            )
        if not self.lease_agent.grant(lease.epoch, ttl_s, lease.job, lease.version):
            return
        self._wanted_model = model
        other = model != self.model
        if other and model not in self.near:
            self.start_anew(f"job {lease.job} needs model {model}")
            other = False
        self.updates.serve(lease.job, lease.version, other_model=other)

    @property
    def kv_kept(self) -> str:
        """Reason why a guest's KV memory stays until it ends, "" if it can give it back."""
        if self.config.kind != "guest":
            return ""
        return self.config.kept_kv(self.config.folders[self.model]) or ""

    def start(self, background: Background) -> None:
        """Start the background tasks that run the engine, the lease agent, weight updates and,
        unless the replica is a guest, the poll of the engine's state.
        """
        if self.kv_kept:
            self._log("kv_kept", message=self.kv_kept)
        # A second supervisor would start another engine beside one that still runs.
        background.start(self._task("supervisor"), self.supervisor.run, restarts=0)
        self._start_leases(background)
        if self.config.kind != "guest":
            # A guest's figures are on its control page already.
            background.start(self._task("gauge"), self.poller.run, restarts=None)

    def _start_leases(self, background: Background) -> None:
        background.start(self._task("lease"), self.lease_agent.run)
        # A failure of these two only makes a replica stale, or its load unknown, so they are
        # restarted without a limit.
        background.start(self._task("updates"), self.updates.run, restarts=None)

    async def leave(self, background: Background, reason: str) -> None:
        """Stop the replica and end its background tasks, while the rest of the node runs on."""
        names = [self._task(part) for part in ("supervisor", "lease", "updates", "gauge")]
        background.let_end(names)
        await self.stop(reason)
        # The supervisor's last act is to release the guest's record; cut off in it, it would leave
        # a lock.
        await background.ended(self._task("supervisor"), END_PATIENCE_S)
        await background.end(names)

    def _task(self, part: str) -> str:
        return f"{self.config.id}: {part}"

    async def stop(self, reason: str) -> None:
        """Revoke the lease, wait up to DRAIN_PATIENCE_S for its turns to end, then stop the
        engine.
        """
        agents = [self.lease_agent, *(each.lease_agent for each in self.further)]
        for agent in agents:
            agent.happened(Revoked(reason))
        await asyncio.gather(*(agent.settle(DRAIN_PATIENCE_S) for agent in agents))
        await self.supervisor.stop()

    async def sleep(self) -> None:
        """Call the engine's sleep route, which frees weights and KV memory. Raises RefusedError or
        UnavailableError.
        """
        await self._client.sleep()

    async def entered(self, state: EngineState) -> None:
        """Handle a new state of the engine: pass it to lease agent and weight updates, and report
        it; an engine with unknown weights or an exposed port is restarted. Raises UnavailableError
        if a healthy engine does not answer.
        """
        if state is EngineState.HEALTHY:
            said = await self._client.state()
            if (beyond := exposed_at(self.config.port)) is not None:
                # Any caller that reaches the port could send turns without a certificate.
                self._broken(f"it listens at {beyond} and not on loopback alone")
            elif said.proven:
                self._trusted = True
                self.lease_agent.happened(EngineUp(said.epoch, said.admitting))
                self.updates.engine_up(said.policy_version, said.job)
                for further in self.further:
                    further.engine_up()
            else:
                self._broken("it does not know which weights it runs")
        else:
            for each in (self, *self.further):
                each.lease_agent.happened(EngineDown())
                each.updates.engine_down()
            # The next engine starts from the folder again, whatever version this one had.
            self.model = self._started_model
        self._log("engine_state", state=state.value)
        self._session.changed()

    def held(self) -> HeldMemory | None:
        """Return a measurement of the memory that a guest holds; None for a dedicated replica."""
        return None

    def must_end(self) -> str | None:
        return None

    def must_wait(self) -> str | None:
        return None

    def hangs(self) -> str | None:
        return None

    def check_room(self) -> None:
        """Raise CardError or EngineStartError if the replica's GPU lacks free memory for the
        engine.
        """
        self._parts.gpus.insist_room(self.config, 0)

    @property
    def held_though_barred(self) -> int | None:
        """Bytes that a guest which must not exist still holds, by the last measurement; None if it
        may exist, was not measured or is no guest. 0 proves the stop.
        """
        return None

    @property
    def reclaim_s(self) -> float:
        """Seconds that a reclaim of the replica's memory may take: the smaller of its own limit and
        the scheduler's deadline.
        """
        return self._parts.orders.caps.reclaim_s(self.config.reclaim_s)

    def _cgroup(self) -> Path | None:
        return None

    def _claim(self) -> GuestLock | None:
        # A dedicated replica ends with its daemon: it has no gate that would freeze it meanwhile.
        return None

    def _lease_told(self, step: LeaseTakenBack | Ended) -> None:
        name, epoch = self.config.id, step.epoch
        if isinstance(step, LeaseTakenBack):
            told = rose_pb2.Revocation(replica=name, epoch=epoch, reason=step.reason)
            self._session.say(revocation=told)
        elif step.asked:
            released = rose_pb2.Released(replica=name, epoch=epoch, aborted=step.aborted)
            self._session.say(released=released)

    def start_anew(self, why: str) -> None:
        """Restart the engine with the model that its lease asks for; the lease continues
        meanwhile. An engine of adapters goes on with its base, which is version 0 of all jobs.
        """
        if self.config.lora is not None and self.model == self._wanted_model:
            self.updates.engine_up(0)
            return
        if self.supervisor.state is not EngineState.HEALTHY and self.model == self._wanted_model:
            return  # the engine that starts now has this model
        self.model = self._started_model = self._wanted_model
        self.updates.engine_down()
        self.lease_agent.happened(SwitchBegun(self.config.start_timeout_s))
        self.lease_agent.happened(EngineDown())
        folder = self.config.folders[self.model]
        self._log("engine_switched", model=self.model, reason=why)
        self.supervisor.switch(replace(self.supervisor.spec, model_dir=folder), why)

    def activated(self, job: str, version: int) -> None:
        if self.model != self._wanted_model and job == self.lease_agent.job:
            # Its weights are now those of the other model, which has the same architecture.
            self.model = self._wanted_model
        self._tell_activation(job, version, ok=True)

    def unproven(self, version: int, why: str) -> None:
        self._tell_activation(self.lease_agent.job, version, why, ok=False)
        self._broken(f"version {version} is not proven")

    def _tell_activation(self, job: str, version: int, why: str = "", *, ok: bool) -> None:
        told = rose_pb2.Activation(
            replica=self.config.id, job=job, version=version, ok=ok, message=why
        )
        self._session.say(activation=told)

    def _broken(self, reason: str) -> None:
        """Revoke the lease and restart the engine with its base weights; the replica is not offered
        until the new engine has proven them.
        """
        self._trusted = False
        for each in (self, *self.further):
            each.lease_agent.happened(Revoked(reason))
        self.supervisor.restart(reason)

    def _log(self, event: str, **fields: object) -> None:
        self._events.write(event, replica=self.config.id, **fields)


class FurtherOffer(Replica):
    """Further offer of a replica whose engine serves several jobs: it has a lease and versions of
    its own, and the engine is that of the first offer.
    """

    def __init__(self, first: Replica, number: int) -> None:
        name = f"{first.config.id}+{number}"
        super().__init__(first.config.model_copy(update={"id": name}), first._parts, number)
        self._first, self.supervisor, self.url = first, first.supervisor, first.url
        first.further.append(self)

    @property
    def offered(self) -> bool:
        return self._first.offered

    def start(self, background: Background) -> None:
        self._start_leases(background)

    async def stop(self, reason: str) -> None:
        """Do nothing: the first offer stops with all leases."""

    def engine_up(self) -> None:
        """Begin anew with an engine that has no adapter of any job."""
        self.lease_agent.happened(EngineUp())
        self.updates.engine_up(0)

    def _broken(self, reason: str) -> None:
        self._first._broken(reason)


class Guest(Replica):
    """Replica that shares the GPU or core of a host: it runs as far as its guard grants, and gives
    memory back to the host.

    The guard thread calls it through `GuardedGuest`.
    """

    def __init__(self, config: ReplicaConfig, parts: NodeParts, host: Host | None) -> None:
        super().__init__(config, parts)
        self.host = host
        self._loop = asyncio.get_running_loop()
        self._orders = parts.orders
        self._hang = HangWatch()
        spec = self.supervisor.spec
        self._boost = CpuBoost(spec.cgroup, share_of(spec) or "background")
        self._proof = StopProof()
        self._still_held: int | None = None

    # ---- rules of the engine's life ----

    def must_end(self) -> str | None:
        """Return why the guest's process must be ended now, else None: the kill switch at once,
        harvest mode OFF once its turns are drained or `reclaim_s` has passed.
        """
        if self._orders.kill_switch.engaged:
            return KILLED
        # A guest that must not exist may still finish draining its turns, within its deadline.
        harvest, name = self._orders.harvest, self.config.id
        if not harvest.off(name):
            return None
        late = harvest.off_s(name) >= self.reclaim_s
        return OFF if late or self.lease_agent.core.status().vacant else None

    def must_wait(self) -> str | None:
        """Return why the guest must not be started now, else None; a guest that runs already may
        stay.
        """
        if not self._orders.harvest.known:
            return UNTOLD
        if self._orders.caps.cut_off:
            return CUT_OFF
        if self.reclaimer and self.reclaimer.holding:
            return self.reclaimer.holding
        # A host of which nothing is known counts as busy.
        idle = self.guard is not None and self.guard.host_idle
        return HOST_BUSY if self.config.gpus and not idle else None

    def hangs(self) -> str | None:
        return self._hang.reason(self.state, self.supervisor.pid)

    def check_room(self) -> None:
        """Raise CardError or EngineStartError if a GPU lacks free memory for the engine beyond the
        host's headroom, or the host computes on another one than it should.
        """
        host, gpus = self._parts.config.host, self._parts.gpus
        gpus.insist_room(self.config, host.headroom_bytes if host else 0)
        if host and self.host:
            gpus.insist_used(host, self.host.publishers)

    def _cgroup(self) -> Path | None:
        parent = self._parts.config.cgroup
        if not parent:
            return None
        try:
            share: Share = "aside" if self.config.gpus else "background"
            return guest_cgroup(parent, self.config.id, share)
        except CgroupRefusedError as error:
            # The guest still runs behind the host as far as the scheduler's classes allow.
            self._log("cgroup_refused", message=str(error))
            return None

    def _claim(self) -> GuestLock | None:
        config, kill_file = self.config, self._parts.orders.kill_switch.file
        return GuestLock(self._parts.config.run_dir, config.id, kill_file, config.orphan_s)

    # ---- grants ----

    def start_guard(self, host: Host) -> None:
        """Create the guest's reclaimer and guard, and start the guard thread, which writes grants
        on the host's control page.
        """
        config = self.config
        limits = GuardConfig(
            token_budget=config.token_budget,
            max_sequences=config.max_sequences,
            slack_share=config.slack_share,
            pressure=config.pressure,
            kv_base_bytes=config.ranks * (config.kv_base_bytes or 0),
        )
        try:
            previous = host.page.grant.read()
        except PageUnreadable:
            previous = None
        self.reclaimer = Reclaimer(self, self._events)
        self.guard = GuardThread(
            self,
            GuardedHost(host.page, host.watch, host.config.pid, max(1, len(config.gpus))),
            GrantController(limits, previous),
            self._orders.kill_switch,
            self._parts.logs.samples,
            self._events,
            self._orders.caps,
        )
        host.guarded = True
        self.guard.start()

    async def end_guard(self) -> None:
        """Cancel a running reclaim and stop the guard thread; the guest then freezes when its last
        grant expires.
        """
        if self.reclaimer:
            await self.reclaimer.end()
        if self.guard:
            await asyncio.to_thread(self.guard.stop)
        self.reclaimer = self.guard = None

    @property
    def name(self) -> str:
        return self.config.id

    @property
    def ranks(self) -> int:
        return self.config.ranks

    @property
    def warming(self) -> bool:
        return self.supervisor.warming

    def lease_epoch(self) -> int | None:
        return self.lease_agent.lease_epoch()

    def boost(self, *, on: bool) -> None:
        self._boost.set(self._healthy_group() if on else None)

    def overdue(self, owed_bytes: int) -> None:
        """Start a reclaim, in the event loop, of `owed_bytes` that the guest kept past their
        deadline (any thread).
        """
        self._loop.call_soon_threadsafe(self._overdue, owed_bytes)

    def stalled(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self.lease_agent.happened, Revoked(reason))

    def guard_broke(self) -> None:
        self._loop.call_soon_threadsafe(self._parts.guard_broke.set)

    def _healthy_group(self) -> int | None:
        # Until it is healthy the section on the page may be that of an earlier life.
        healthy = self.supervisor.state is EngineState.HEALTHY
        return self.supervisor.pid if healthy else None

    # ---- memory ----

    @property
    def state(self) -> GuestState | None:
        return self.guard.guest if self.guard else None

    @property
    def can_sleep(self) -> bool:
        return self.config.sleep_mode

    @property
    def sleep_bytes(self) -> int | None:
        return self.config.weights_bytes if self.config.kv_backend == "cuda" else None

    def gauge(self) -> MemoryGauge:
        def group() -> int | None:
            return self.supervisor.pid

        if not self.config.gpus:
            return HostMemory(group)
        gpus = self._parts.gpus
        cards = gpus.cards(self.config.gpus)
        return DeviceMemory(gpus.reader, cards, group, lambda: self.state)

    def held(self) -> HeldMemory:
        """Measure the guest's memory now, with its source (any thread, takes milliseconds)."""
        return HeldMemory.now(self.gauge())

    def hold(self, cap: int | None) -> None:
        assert self.guard is not None
        self.guard.hold(cap)

    def kill(self, reason: str) -> None:
        self.supervisor.restart(reason)

    def _overdue(self, owed_bytes: int) -> None:
        guard, reclaimer = self.guard, self.reclaimer
        if guard and reclaimer and self._healthy_group() is not None:
            reclaimer.begin(owed_bytes, self.reclaim_s, OVERDUE, lambda: guard.owed_bytes == 0)

    @property
    def held_though_barred(self) -> int | None:
        amount = self._still_held
        return amount if amount is not None and self._orders.bars(self.config.id) else None

    async def prove_stop(self) -> None:
        """Measure the memory of a guest that must not exist, and log `stop_proved` or
        `stop_overdue` once.

        The measurement runs in a thread: a kernel or driver that hangs must not delay leases.
        """
        name = self.config.id
        barred = self._orders.bars(name)
        held = await asyncio.to_thread(self.held) if barred and self.reclaimer else None
        if self.guard is None:
            return  # the host left meanwhile
        self._still_held = amount = held.amount if held else None
        order_s = self._orders.harvest.off_since_s(name)
        seen = Measured(barred, amount, self.guard.duty(), self.reclaim_s, order_s)
        for said in self._proof.step(seen, time.monotonic()):
            self._log(said.event, **said.fields)


# Keys of a model's configuration that do not change the shape or meaning of its weights.
UNSHAPED = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version"})


@lru_cache(maxsize=256)
def same_architecture(one: Path, other: Path) -> bool:
    """Return True if the `config.json` files of two model folders are equal apart from names and
    dtype, so that the weights have equal shapes; False if one cannot be read. Results are cached.
    """
    try:
        first, second = (
            {k: v for k, v in said.items() if k not in UNSHAPED}
            for said in (json.loads((f / "config.json").read_text()) for f in (one, other))
        )
    except (OSError, ValueError, AttributeError):
        return False
    return first == second


def build_reports(
    node: str,
    replicas: Sequence[Replica],
    hosts: Sequence[rose_pb2.HostTelemetry] = (),
    left: tuple[int, int] = (0, 0),
) -> list[rose_pb2.NodeReport]:
    """Return two reports for the scheduler: the offers of all replicas, then the telemetry of
    guests and hosts.

    left: counts (met targets, missed one) of requests of hosts that are gone.
    """
    offers = rose_pb2.Offers(offers=[_offer(replica) for replica in replicas])
    telemetry = rose_pb2.Telemetry(
        guests=[_guest(replica) for replica in replicas],
        hosts=hosts if len(hosts) > 1 else (),
    )
    if hosts:
        telemetry.host.CopyFrom(summed(hosts, left))
    return [
        rose_pb2.NodeReport(node=node, offers=offers),
        rose_pb2.NodeReport(node=node, telemetry=telemetry),
    ]


def view_of(replica: Replica) -> ReplicaFigures:
    """Return a replica's current figures for `/metrics`; those of grants and memory only for a
    guest with a guard.
    """
    guard = replica.guard
    view = ReplicaFigures(
        name=replica.config.id,
        state=replica.supervisor.state.value,
        restarts=replica.supervisor.restarts,
        policy_version=replica.updates.version,
        ranks=replica.config.ranks,
    )
    if guard is None:
        return view
    return replace(
        view,
        duty=guard.duty(),
        granted=guard.granted,
        grant=guard.grant,
        guest=guard.guest,
        owed_bytes=guard.owed_bytes,
        held=replica.held(),
        reclaim_s=replica.reclaim_s,
        host=replica.host.config.name if replica.host else "",
    )


def _offer(replica: Replica) -> rose_pb2.Offer:
    config, offers = replica.config, replica.config.offers
    return rose_pb2.Offer(
        replica=config.id,
        kind=_KINDS[config.kind],
        url=replica.url,
        kv_tokens=config.kv_tokens // offers,
        decode_tok_s=config.decode_tok_s / offers,
        prefill_tok_s=config.prefill_tok_s / offers,
        max_sequences=config.max_sequences // offers,
        policy_version=replica.updates.version,
        job=replica.updates.job,
        model=replica.model,
        models=sorted(replica.config.folders.keys() - {replica.model}),
        near=replica.near,
        healthy=replica.offered,
        ttl_s=OFFER_TTL_S,
        epoch=replica.lease_agent.core.status().epoch,
        held=replica.lease_agent.held(),
    )


def _guest(replica: Replica) -> rose_pb2.GuestTelemetry:
    guard = replica.guard
    grant = guard.grant if guard else None
    state = (guard.guest or GuestState()) if guard else replica.poller.state
    reason = grant.reason if grant else ""
    if grant and grant.token_budget:
        reason = state.gate_reason
    return rose_pb2.GuestTelemetry(
        replica=replica.config.id,
        lend_bytes=_lend_bytes(replica.config, guard),
        kv_bytes=state.bytes_mapped,
        mode=grant.mode.name.lower() if grant else "none",
        reason=reason,
        tokens_total=state.tokens_total,
        running=state.running,
        waiting=state.waiting,
        duty=guard.duty() if guard else 1.0,
        policy_version=replica.updates.version,
        state=replica.supervisor.state.value,
        restarts=replica.supervisor.restarts,
        held_bytes=replica.held_though_barred,
        late=replica.updates.late,
        ranks=replica.config.ranks,
        kv_kept=replica.kv_kept,
    )


def _lend_bytes(config: ReplicaConfig, guard: GuardThread | None) -> int | None:
    """Return the KV bytes that the guest could have now: its own, plus the host's unused share of
    the rest; None without a guard.
    """
    if guard is None:
        return None
    own, whole, host = config.kv_base_bytes, config.ranks * config.kv_bytes, guard.host
    if own is None or own >= config.kv_bytes:
        return whole
    own *= config.ranks
    if host is None or not host.kv_total:
        return own
    return own + round((whole - own) * (1.0 - host.kv_used / host.kv_total))
