"""NodeDaemon: assembles guard, supervisors, weight receiver and the scheduler session."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

import aiohttp

from executor import ControlPage, LatencyRecord
from rose.errors import RoseError
from rose.logs.eventlog import Logs
from rose.logs.rotating_jsonl import private_folder, trim_output
from rose.node.config import NodeConfig
from rose.node.grants.caps import Contact, ToldCaps
from rose.node.grants.guard_thread import GUEST_SAMPLES, GuardThread
from rose.node.grants.host_load import HostLoad, SloCounter
from rose.node.grants.host_scrape import HostScrape
from rose.node.grants.host_scrape import watch as watch_metrics
from rose.node.grants.host_watch import HOST_LATENCY, HostWatch
from rose.node.guest.harvest_switch import HarvestSwitch
from rose.node.guest.kill_switch import KillSwitch
from rose.node.guest.stop_proof import Measured, StopProof
from rose.node.memory_gauges import Gpus, Held
from rose.node.metrics import NodeHealth, NodeMetrics, ReplicaFigures
from rose.node.reclaimer import Reclaimer
from rose.node.replica import Replica
from rose.node.scheduler_session import SchedulerSession, build_reports, view_of
from rose.node.weight_updates import AnnouncedVersions, KnownVersion, WeightNetwork, WeightSource
from rose.node.wiring import HostSide, Wiring
from rose.process.background_tasks import Background
from rose.rpc import rose_pb2
from rose.security.audit_log import AuditLog, audit_file

STOPPING = "node stops"
TRIM_EVERY_S = 60.0
MEASURE_EVERY_S = 0.25
# What takes capacity, gives it back, ends a guest or decides which weights it runs.
AUDITED = frozenset(
    {
        "command_refused",
        "engine_reclaimed",
        "engine_unwanted",
        "kill_switch_set",
        "lease_ended",
        "lease_taken",
        "lease_taken_back",
        "node_started",
        "node_stopped",
        "quarantined",
        "version_refused",
    }
)


class GuardDiedError(RoseError):
    """The grant loop broke; its guest is frozen and the node must be started anew."""


class NodeDaemon:
    """One node. `run` returns when `stop` was called and nothing it started is left."""

    def __init__(self, config: NodeConfig, gpus: Gpus | None = None) -> None:
        """Raises CardError where a replica's GPU cannot be used."""
        self._config = config
        self._gpus = gpus or Gpus()
        self._gpus.insist_all(config)
        self._logs = Logs(config.log_dir, config.logs.limits)
        self._events = self._logs.events(config.node)
        self._background = Background(self._events.write)
        self._chain = AnnouncedVersions()
        self._harvest = HarvestSwitch()
        self._contact = contact = Contact()
        self._caps = ToldCaps(contact.lost_s)
        self._kill_switch = KillSwitch(config.kill_file)
        self._stopping = asyncio.Event()
        self._guard_broke = asyncio.Event()
        self._metrics = NodeMetrics(config.host, self._views, self._health)
        self._events.listen(self._heard)
        self._audit = AuditLog(audit_file(config.log_dir, config.node), config.node)
        self._slo = SloCounter()
        self._load = HostLoad()
        self._scrape: HostScrape | None = None
        self._host: HostSide | None = None
        if config.host:
            page = ControlPage.ensure(config.host.page, config.host.page_group)
            latencies = self._logs.records(HOST_LATENCY)
            watch = HostWatch(latencies, self._served, page.latency.cursor)
            targets = config.host.ttft_target_s, config.host.tpot_target_s
            self._slo = SloCounter(*targets)
            if config.host.metrics_url:
                self._scrape = HostScrape(*targets, config.host.metrics_model)
            self._host = HostSide(config.host, page, watch)
        self._guards: dict[str, GuardThread] = {}
        self._reclaimers: dict[str, Reclaimer] = {}
        self._replicas: dict[str, Replica] = {}
        self._still_held: dict[str, int | None] = {}
        self._network = WeightNetwork(config)
        self._certificates = config.certificates.files
        self._session = SchedulerSession(
            config.scheduler,
            config.node,
            self._reports,
            self._obey,
            self._events,
            config.cluster,
            self._network.relay_url,
            self._certificates,
            config.labels,
            contact,
        )

    def stop(self) -> None:
        """Drain, end every engine, and let `run` return."""
        self._stopping.set()

    def kill(self) -> None:
        """Set the kill switch: every guest ends at once, and none starts until it is taken back."""
        self._kill_switch.engage()
        self._events.write("kill_switch_set", by="signal")

    async def run(self) -> None:
        """Serve until stopped. Raises what broke, once everything it started is ended."""
        private_folder(self._config.run_dir)
        if self._config.metrics_port:
            await self._metrics.serve(self._config.metrics_port)
        connector = aiohttp.TCPConnector(limit=64)
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            stack.push_async_callback(self._network.close)
            self._build(await self._network.start(http, self._chain))
            self._start(http)
            stopping = asyncio.create_task(self._stopping.wait())
            failed = asyncio.create_task(self._background.failed())
            try:
                await asyncio.wait((stopping, failed), return_when=asyncio.FIRST_COMPLETED)
            finally:
                await self._end()
                stopping.cancel()
            if failed.done():
                failed.result()
            failed.cancel()

    def _build(self, source: WeightSource) -> None:
        activations = self._logs.records("activations.jsonl")
        activations.listen(self._activated)
        assembly = Wiring(
            self._config, self._events, self._harvest, self._kill_switch,
            self._logs.records(GUEST_SAMPLES), self._host, self._guards, self._gpus,
            self._caps, self._reclaimers,
        )  # fmt: skip
        for config in self._config.replicas:
            self._replicas[config.id] = replica = Replica(
                config,
                assembly.supervisor_of(config),
                source,
                activations,
                self._events,
                self._session.say,
                self._session.changed,
            )
            if config.kind == "guest" and self._host:
                assembly.guard_of(replica, self._host, self._guard_broke.set)
        self._events.write("node_started", node=self._config.node)

    def _start(self, http: aiohttp.ClientSession) -> None:
        host = self._config.host
        if host and host.metrics_url and self._scrape:
            scraping = partial(watch_metrics, host.metrics_url, self._scrape, http)
            self._background.start("scrape", scraping, restarts=None)
        # Without its scheduler a node's leases run out: it looks for one for ever.
        self._background.start("session", self._session.run, restarts=None)
        self._background.start("guards", self._watch_guards, restarts=0)
        self._background.start("held memory", self._measure_held, restarts=None)
        self._background.start("engine logs", self._trim_engine_logs, restarts=None)
        for replica in self._replicas.values():
            replica.start(self._background)

    async def _watch_guards(self) -> None:
        await self._guard_broke.wait()
        why = "; ".join(guard.broke for guard in self._guards.values() if guard.broke)
        raise GuardDiedError(
            f"the grant loop broke ({why}); its guest is frozen: start the node again"
        )

    async def _trim_engine_logs(self) -> None:
        """What an engine prints goes to a file of its own, which it never closes."""
        while True:
            for replica in self._replicas.values():
                log = replica.supervisor.spec.log
                if await asyncio.to_thread(trim_output, log, self._config.logs.limits):
                    self._events.write("engine_log_trimmed", engine=replica.config.id)
            await asyncio.sleep(TRIM_EVERY_S)

    async def _end(self) -> None:
        self._background.let_end()
        await asyncio.gather(*(replica.stop(STOPPING) for replica in self._replicas.values()))
        for guard in self._guards.values():
            guard.stop()
        await self._background.close()
        self._metrics.close()
        self._events.write("node_stopped", node=self._config.node)
        await asyncio.to_thread(self._logs.close)
        await asyncio.to_thread(self._audit.close)

    def _add_scraped(self, host: rose_pb2.HostTelemetry, seen: HostScrape, now_s: float) -> None:
        """The same, of a host without the plugin."""
        host.source = "scrape"
        host.slo_good, host.slo_bad = seen.good, seen.bad
        host.running, host.waiting = seen.running(now_s) or (0, 0)
        said = seen.summary(now_s)
        host.window_requests, host.window_s = said.requests, said.window_s
        host.ttft_p50_s, host.ttft_p95_s = said.ttft_p50_s, said.ttft_p95_s
        host.tpot_p50_s, host.tpot_p95_s = said.tpot_p50_s, said.tpot_p95_s
        share = seen.busy_share(now_s)
        if share is not None:
            host.busy_share = share

    def _health(self) -> NodeHealth:
        counted = self._scrape or self._slo
        return NodeHealth(
            self._logs.dropped,
            self._background.restarted(),
            self._background.running(),
            killed=self._kill_switch.engaged,
            cut_off_s=self._contact.lost_s(),
            requests=(counted.good, counted.bad) if self._host else None,
            certificate=self._certificates.validity_s if self._certificates else None,
        )

    def _heard(self, event: str, fields: Mapping[str, object]) -> None:
        self._metrics.heard(event, fields)
        if event in AUDITED:
            self._audit.write(event, dict(fields))

    def _activated(self, record: Mapping[str, object]) -> None:
        self._metrics.activated(record)
        self._audit.write("activated", dict(record))

    def _reports(self) -> list[rose_pb2.NodeReport]:
        watch = self._host.watch if self._host else None
        reports = build_reports(self._config, self._replicas, self._guards, watch)
        for report in reports:
            if report.telemetry.HasField("host"):
                self._add_load(report.telemetry.host)
            for guest in report.telemetry.guests:
                self._add_held(guest)
        return reports

    def _add_held(self, guest: rose_pb2.GuestTelemetry) -> None:
        """What a guest that must not be there holds all the same: a stop is proved by measuring."""
        amount = self._still_held.get(guest.replica)
        if amount is not None and self._barred(guest.replica):
            guest.held_bytes = amount

    async def _measure_held(self) -> None:
        """In a thread: a kernel or driver that hangs must not hold up leases."""
        proofs = {name: StopProof() for name in self._reclaimers}
        while True:
            for name, proof in proofs.items():
                held: Held | None = None
                barred = self._barred(name)
                if barred:
                    held = await asyncio.to_thread(self._held, name)
                self._still_held[name] = amount = held.amount if held else None
                deadline_s = self._caps.reclaim_s(self._replicas[name].config.reclaim_s)
                duty, order_s = self._guards[name].duty(), self._harvest.off_since_s(name)
                seen = Measured(barred, amount, duty, deadline_s, order_s)
                for said in proof.step(seen, time.monotonic()):
                    self._events.write(said.event, replica=name, **said.fields)
            await asyncio.sleep(MEASURE_EVERY_S)

    def _barred(self, name: str) -> bool:
        return self._kill_switch.engaged or self._harvest.off(name)

    def _served(self, record: LatencyRecord) -> None:
        self._slo.count(record)
        self._metrics.served(record)

    def _add_load(self, host: rose_pb2.HostTelemetry) -> None:
        """What capacity policies go by."""
        if self._scrape is not None:
            self._add_scraped(host, self._scrape, time.monotonic())
            return
        host.source = "plugin"
        host.slo_good, host.slo_bad = self._slo.good, self._slo.bad
        seen = next((guard.host for guard in self._guards.values() if guard.host), None)
        share = self._load.busy_share(None if seen is None else seen.busy_ns)
        if share is not None:
            host.busy_share = share

    def _views(self) -> list[ReplicaFigures]:
        return [self._view(name, replica) for name, replica in self._replicas.items()]

    def _view(self, name: str, replica: Replica) -> ReplicaFigures:
        guard = self._guards.get(name)
        view = view_of(replica, guard, self._held(name))
        if guard is None:
            return view
        return replace(view, reclaim_s=self._caps.reclaim_s(replica.config.reclaim_s))

    def _held(self, name: str) -> Held | None:
        reclaimer = self._reclaimers.get(name)
        return reclaimer.held() if reclaimer else None

    def _obey(self, command: rose_pb2.NodeCommand) -> None:
        match command.WhichOneof("command"):
            case "lease":
                if replica := self._replicas.get(command.lease.replica):
                    ttl_s = self._caps.lease_ttl_s(command.lease.ttl_s)
                    replica.lease(command.lease, ttl_s)
            case "release":
                if replica := self._replicas.get(command.release.replica):
                    replica.lease_agent.release(command.release.epoch, command.release.reason)
            case "version":
                said = command.version
                known = KnownVersion(said.job, said.version, said.parent, said.url)
                self._chain.add(known)
                self._network.follow(known)
                for replica in self._replicas.values():
                    replica.updates.wake()
            case "harvest":
                self._harvest.take(command.harvest)
            case "caps":
                self._caps.take(command.caps)
            case "relays":
                self._network.enrol(command.relays.urls)
            case _:
                self._ignore(command)

    def _ignore(self, command: rose_pb2.NodeCommand) -> None:
        """An empty command comes each second, and says only that the leader lives."""
        if command.ByteSize():  # of a newer scheduler
            self._events.write("command_ignored", command=None)
