"""NodeDaemon: assembles guard, supervisors, weight receiver and the scheduler session."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import aiohttp

from executor import ControlPage, PageError
from executor.control_page.page import check_folder
from rose.addresses import is_loopback
from rose.errors import RoseError
from rose.logs.eventlog import Logs
from rose.logs.rotating_jsonl import private_folder, trim_output
from rose.node.config import DiscoverConfig, HostConfig, NodeConfig
from rose.node.discovery import (
    LOOK_S,
    FoundHost,
    HostBook,
    HostFound,
    HostLost,
    PageDead,
    PageRefused,
    look,
    sweep,
)
from rose.node.guest.guard import GUEST_SAMPLES, GuardThread
from rose.node.guest.kill_switch import KillSwitch
from rose.node.guest.memory_gauges import Gpus
from rose.node.host import HOST_LATENCY, LOOK_EVERY_S, Host
from rose.node.host import watch as watch_metrics
from rose.node.lease import Released
from rose.node.metrics import HostFigures, NodeHealth, NodeMetrics, ReplicaFigures
from rose.node.order_spans import OrderSpans
from rose.node.orders import HarvestSwitch, Orders, SchedulerCaps
from rose.node.proxy_process import ProxyProcess
from rose.node.replica import (
    FurtherOffer,
    Guest,
    NodeLogs,
    NodeParts,
    Replica,
    build_reports,
    view_of,
)
from rose.node.scheduler_session import NodeIdentity, SchedulerSession
from rose.node.weight_updates import AnnouncedVersions, KnownVersion, WeightNetwork, WeightSource
from rose.otlp import export_metrics
from rose.process.background_tasks import Background
from rose.rpc import rose_pb2
from rose.security.audit_log import AuditLog, audit_file
from rose.tracing import spans_of

DISCOVERY = "discovery"
PROXY = "proxy"
STOPPING = "node stops"
HOST_LEFT = "its host left"
SHARED_GPU = "another host is on one of its GPUs, and a guest goes by one"
TRIM_EVERY_S = 60.0
MEASURE_EVERY_S = 0.25
# Events that take capacity, give it back, end a guest or decide which weights it runs.
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
    """Error raised when a guard's grant loop broke: its guest is frozen, and the node must be
    restarted.
    """


@dataclass(slots=True)
class Room:
    """One host and the replicas beside it; without a host, the replicas that have a GPU alone.

    The room of the host in a node's file stays as long as the daemon runs, that of a discovered
    host until it leaves.
    """

    host: Host | None
    replicas: list[Replica] = field(default_factory=list)


class NodeDaemon:
    """Node daemon: it runs the node's replicas, guards, weight updates, metrics and scheduler
    session until `stop`.
    """

    def __init__(self, config: NodeConfig, gpus: Gpus | None = None) -> None:
        """Raise CardError if a replica's GPU cannot be used, PageError if a control page cannot."""
        self._config = config
        self._gpus = gpus or Gpus()
        self._gpus.insist_all(config.with_host(None) if config.discover else config)
        self._logs = Logs(config.log_dir, config.logs.limits)
        self._events = self._logs.events(config.node)
        self._background = Background(self._events.write)
        self._chain = AnnouncedVersions()
        kill_switch = KillSwitch(config.kill_file)
        self._orders = Orders(HarvestSwitch(), kill_switch, SchedulerCaps())
        self._stopping = asyncio.Event()
        self._guard_broke = asyncio.Event()
        self._metrics = NodeMetrics(self._hosts, self._views, self._health)
        self._spans = OrderSpans(spans_of("rose-node"))
        self._events.listen(self._heard)
        self._audit = AuditLog(audit_file(config.log_dir, config.node), config.node)
        self._host: Host | None = None
        if config.host:
            page = ControlPage.ensure(config.host.page, config.host.page_group)
            latencies = self._logs.records(HOST_LATENCY)
            self._host = Host(config.host, page, latencies, page.take_guard())
        if config.discover:
            check_folder(config.discover.folder)
        self._book = HostBook(config.discover.at_most if config.discover else 0)
        self._rooms: dict[str, Room] = {}
        # Requests of hosts that are gone: (met their targets, missed one).
        self._left_requests = 0, 0
        self._replicas: dict[str, Replica] = {}
        self._network = WeightNetwork(config)
        self._certificates = config.certificates.files
        self._session = SchedulerSession(
            config.scheduler,
            NodeIdentity(config.node, config.cluster, self._network.relay_url, config.labels),
            self._reports,
            self._obey,
            self._events,
            self._certificates,
            self._orders.caps,
        )
        self._proxy = ProxyProcess(config, self._session.changed) if config.proxy else None

    def stop(self) -> None:
        """Signal `run` to drain leases, end every engine and return; this call does not wait."""
        self._stopping.set()

    def kill(self) -> None:
        """Set the kill switch, so that every guest ends at once and none starts until its file is
        removed.
        """
        self._orders.kill_switch.engage()
        self._events.write("kill_switch_set", by="signal")

    async def run(self) -> None:
        """Run the node until `stop`; end everything that it started, then raise the error of a
        background task that failed for good.
        """
        private_folder(self._config.run_dir)
        if self._config.metrics_port:
            await self._serve_metrics(self._config.metrics_port)
        registry = self._metrics.registry
        export_metrics("rose-node", lambda: None, lambda _: registry.collect())
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

    async def _serve_metrics(self, port: int) -> None:
        host, files = self._config.metrics_host, self._certificates
        # A process of this machine needs no proof of who answers on loopback.
        tls = files.server_context(everybody=True) if files and not is_loopback(host) else None
        await self._metrics.serve(port, host, tls)

    def _build(self, source: WeightSource) -> None:
        activations = self._logs.records("activations.jsonl")
        activations.listen(self._activated)
        self._parts = NodeParts(
            self._config,
            NodeLogs(self._events, self._logs.records(GUEST_SAMPLES), activations),
            self._orders,
            self._gpus,
            source,
            self._session,
            self._proxy,
            self._guard_broke,
        )
        if self._config.discover:
            self._rooms[""] = self._furnish(self._config.with_host(None), None)
        else:
            self._rooms[""] = self._furnish(self._config, self._host)
        self._events.write("node_started", node=self._config.node)

    def _furnish(self, config: NodeConfig, host: Host | None) -> Room:
        """Create the replicas of `config` beside a host, or without one; start the guard of each
        guest and return their room.
        """
        room, parts = Room(host), replace(self._parts, config=config)
        for each in config.replicas:
            guest = Guest(each, parts, host) if each.kind == "guest" else None
            replica = guest or Replica(each, parts)
            further = [FurtherOffer(replica, number) for number in range(1, each.offers)]
            for offered in (replica, *further):
                self._replicas[offered.config.id] = offered
                room.replicas.append(offered)
            if guest and host:
                guest.start_guard(host)
        return room

    def _start(self, http: aiohttp.ClientSession) -> None:
        host = self._host
        if host and host.config.metrics_url and host.scrape:
            scraping = partial(watch_metrics, host.config.metrics_url, host.scrape, http)
            self._background.start("scrape", scraping, restarts=None)
        # Without its scheduler a node's leases expire, so it looks for one for ever.
        self._background.start("session", self._session.run, restarts=None)
        self._background.start("guards", self._watch_guards, restarts=0)
        self._background.start("held memory", self._measure_held, restarts=None)
        self._background.start("engine logs", self._trim_engine_logs, restarts=None)
        self._background.start("host latencies", self._look_at_hosts, restarts=None)
        if self._proxy:
            self._background.start(PROXY, self._proxy.run, restarts=None)
        for replica in self._replicas.values():
            replica.start(self._background)
        if self._config.discover:
            # The first scan starts at once: guests of an earlier daemon wait to be adopted, and not
            # for long.
            finding = partial(self._find_hosts, self._config.discover)
            self._background.start(DISCOVERY, finding, restarts=None)

    async def _find_hosts(self, discover: DiscoverConfig) -> None:
        while True:
            await self._look_for_hosts(discover)
            await asyncio.sleep(LOOK_S)

    async def _look_for_hosts(self, discover: DiscoverConfig) -> None:
        """Scan the folder for hosts, close the rooms of lost ones and open those of new ones; the
        scan runs in a thread, because a folder that hangs must not delay leases.
        """
        seen = await asyncio.to_thread(look, discover.folder, discover.page_group)
        acts = self._book.step(seen)
        await asyncio.gather(*(self._close(act.name) for act in acts if isinstance(act, HostLost)))
        for act in acts:
            match act:
                case PageRefused():
                    self._refused(act)
                case PageDead():
                    await self._sweep(act)
                case HostFound():
                    await self._take_in(act, discover)

    async def _sweep(self, dead: PageDead) -> None:
        try:
            swept = await asyncio.to_thread(sweep, dead.page, dead.inode)
        except OSError as error:
            why = f"{dead.page} of a dead host cannot be removed: {error.strerror}"
            self._refused(PageRefused(dead.page, why))
        else:
            if swept:
                self._events.write("page_swept", page=str(dead.page))

    async def _take_in(self, came: HostFound, discover: DiscoverConfig) -> None:
        """Open the room of a new host; a host that cannot be opened is forgotten, so that the next
        scan tries again.
        """
        try:
            await self._open(came.host, came.slot, discover)
        except PageError as error:
            for refused in self._book.untaken(came.host, str(error)):
                self._refused(refused)
        except BaseException as error:
            self._book.untaken(came.host, repr(error))
            raise

    def _refused(self, refused: PageRefused) -> None:
        self._events.write("host_refused", page=str(refused.page), message=refused.reason)

    async def _open(self, found: FoundHost, slot: int, discover: DiscoverConfig) -> None:
        """Open a host's control page, create its room and start its replicas; a host that cannot
        have a guest gets none. Raises PageError.
        """
        named: dict[str, object] = {"host": found.name, "page": str(found.page)}
        config = found.config(discover)
        page = ControlPage.open(found.page, discover.page_group)
        try:
            if page.inode != found.inode:
                raise PageError(f"{found.page} is another file by now")  # noqa: TRY301
            host = Host(config, page, self._logs.records(HOST_LATENCY), page.take_guard())
        except PageError:
            page.close()
            raise
        self._events.write("host_found", **named, slot=slot, model=found.said.model)
        try:
            beside = await self._beside(found, config, slot)
            room = self._rooms[found.name] = self._furnish(beside, host)
        except BaseException:
            host.close()
            raise
        for replica in room.replicas:
            replica.start(self._background)

    async def _beside(self, found: FoundHost, config: HostConfig, slot: int) -> NodeConfig:
        """Return the node's configuration with this host alone, and with its guest if the host can
        have one.
        """
        try:
            wanted = self._config.with_host(config, slot)
            if wanted.replicas and not found.alone:
                raise RoseError(SHARED_GPU)  # noqa: TRY301
            if wanted.replicas:
                # Ask the driver in a thread, since it may hang.
                await asyncio.to_thread(self._gpus.insist_all, wanted)
        except RoseError as error:
            self._events.write("host_without_guest", host=found.name, message=str(error))
            return self._config.with_host(None, slot)
        return wanted

    async def _close(self, name: str) -> None:
        """Stop the guest of a host that left, and close the host's page; unknown names are
        ignored.
        """
        room = self._rooms.get(name)
        if room is None or room.host is None:
            return
        for replica in room.replicas:
            await replica.leave(self._background, HOST_LEFT)
            if isinstance(replica, Guest):
                await replica.end_guard()
            self._replicas.pop(replica.config.id, None)
        del self._rooms[name]
        good, bad = room.host.requests
        self._left_requests = self._left_requests[0] + good, self._left_requests[1] + bad
        room.host.close()
        self._events.write("host_left", host=name)
        self._session.changed()

    async def _look_at_hosts(self) -> None:
        """Read new latencies of hosts without a guest, again and again; guards read those of the
        others.
        """
        while True:
            for room in self._rooms.values():
                if room.host:
                    room.host.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _watch_guards(self) -> None:
        await self._guard_broke.wait()
        why = "; ".join(guard.broke for guard in self._guards if guard.broke)
        raise GuardDiedError(
            f"the grant loop broke ({why}); its guest is frozen: start the node again"
        )

    async def _trim_engine_logs(self) -> None:
        """Trim the output files of engines and proxy to the log limits once a minute, for ever,
        because engines never close them.
        """
        while True:
            logs = {name: each.supervisor.spec.log for name, each in self._replicas.items()}
            if self._proxy:
                logs[PROXY] = self._proxy.log
            for name, log in logs.items():
                if await asyncio.to_thread(trim_output, log, self._config.logs.limits):
                    self._events.write("engine_log_trimmed", engine=name)
            await asyncio.sleep(TRIM_EVERY_S)

    async def _end(self) -> None:
        self._background.let_end()
        await self._background.end(
            [DISCOVERY]
        )  # first, or it would open rooms of new hosts meanwhile
        await asyncio.gather(*(replica.stop(STOPPING) for replica in self._replicas.values()))
        for guard in self._guards:
            guard.stop()
        await self._background.close()
        self._metrics.close()
        for room in self._rooms.values():
            if room.host:
                room.host.close()  # which also releases the right to grant on its page
        self._events.write("node_stopped", node=self._config.node)
        await asyncio.to_thread(self._logs.close)
        await asyncio.to_thread(self._audit.close)

    def _health(self) -> NodeHealth:
        return NodeHealth(
            self._logs.dropped,
            self._background.restarted(),
            self._background.running(),
            killed=self._orders.kill_switch.engaged,
            cut_off_s=self._orders.caps.lost_s(),
            certificate=self._certificates.validity_s if self._certificates else None,
            damaged_files=self._network.damaged_files,
            hosts=self._count_hosts(),
        )

    def _count_hosts(self) -> dict[str, int]:
        guarded = [room.host.guarded for room in list(self._rooms.values()) if room.host]
        watched = guarded.count(False)
        return {
            "guarded": len(guarded) - watched,
            "watched": watched,
            "refused": self._book.refused,
        }

    def _heard(self, event: str, fields: Mapping[str, object]) -> None:
        self._metrics.heard(event, fields)
        self._spans.heard(event, fields)
        if event in AUDITED:
            self._audit.write(event, dict(fields))

    def _activated(self, record: Mapping[str, object]) -> None:
        self._metrics.activated(record)
        self._spans.heard("activated", record)
        self._audit.write("activated", dict(record))

    def _reports(self) -> list[rose_pb2.NodeReport]:
        node = self._config.node
        hosts = [room.host.telemetry(node) for room in self._rooms.values() if room.host]
        return build_reports(node, list(self._replicas.values()), hosts, self._left_requests)

    async def _measure_held(self) -> None:
        while True:
            for replica in list(self._replicas.values()):
                if isinstance(replica, Guest) and replica.guard:
                    await replica.prove_stop()
            await asyncio.sleep(MEASURE_EVERY_S)

    @property
    def _guards(self) -> list[GuardThread]:
        return [each.guard for each in self._replicas.values() if each.guard]

    def _hosts(self) -> list[HostFigures]:
        return [room.host.figures() for room in list(self._rooms.values()) if room.host]

    def _views(self) -> list[ReplicaFigures]:
        return [view_of(replica) for replica in list(self._replicas.values())]

    def _obey(self, command: rose_pb2.NodeCommand) -> None:
        self._spans.ordered(command)
        match command.WhichOneof("command"):
            case "lease":
                if replica := self._replicas.get(command.lease.replica):
                    ttl_s = self._orders.caps.lease_ttl_s(command.lease.ttl_s)
                    replica.lease(command.lease, ttl_s)
            case "release":
                if replica := self._replicas.get(command.release.replica):
                    order = command.release
                    replica.lease_agent.happened(Released(order.epoch, order.reason))
            case "version":
                said = command.version
                known = KnownVersion(said.job, said.version, said.parent, said.url)
                self._chain.add(known)
                self._network.follow(known)
                for replica in self._replicas.values():
                    replica.updates.wake()
            case "harvest":
                self._orders.harvest.take(command.harvest)
            case "caps":
                self._orders.caps.take(command.caps)
            case "relays":
                self._network.enrol(command.relays.urls)
            case _:
                self._ignore(command)

    def _ignore(self, command: rose_pb2.NodeCommand) -> None:
        """Log a command that this release does not know; an empty command is only the leader's
        heartbeat.
        """
        if command.ByteSize():  # a command of a newer scheduler
            self._events.write("command_ignored", command=None)
