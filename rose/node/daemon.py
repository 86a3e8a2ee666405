"""NodeDaemon: assembles guard, supervisors, weight receiver and the scheduler session."""

import asyncio
from contextlib import AsyncExitStack

import aiohttp

from executor import ControlPage
from rose.errors import RoseError
from rose.logs.eventlog import Logs
from rose.logs.rotating_jsonl import private_folder, trim_output
from rose.node.config import NodeConfig
from rose.node.grants.guard_thread import GUEST_SAMPLES, GuardThread
from rose.node.grants.host_watch import HOST_LATENCY, HostWatch
from rose.node.guest.harvest_switch import HarvestSwitch
from rose.node.guest.kill_switch import KillSwitch
from rose.node.memory_gauges import Gpus, Held
from rose.node.metrics import NodeHealth, NodeMetrics, ReplicaFigures
from rose.node.reclaimer import Reclaimer
from rose.node.replica import Replica
from rose.node.scheduler_session import SchedulerSession, build_reports, view_of
from rose.node.weight_updates import AnnouncedVersions, KnownVersion, WeightNetwork, WeightSource
from rose.node.wiring import HostSide, Wiring
from rose.process.background_tasks import Background
from rose.rpc import rose_pb2

STOPPING = "node stops"
TRIM_EVERY_S = 60.0


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
        self._kill_switch = KillSwitch(config.kill_file)
        self._stopping = asyncio.Event()
        self._guard_broke = asyncio.Event()
        self._metrics = NodeMetrics(config.host, self._views, self._health)
        self._events.listen(self._metrics.heard)
        self._host: HostSide | None = None
        if config.host:
            page = ControlPage.ensure(config.host.page, config.host.page_group)
            latencies = self._logs.records(HOST_LATENCY)
            watch = HostWatch(latencies, self._metrics.served, page.latency.cursor)
            self._host = HostSide(config.host, page, watch)
        self._guards: dict[str, GuardThread] = {}
        self._reclaimers: dict[str, Reclaimer] = {}
        self._replicas: dict[str, Replica] = {}
        self._network = WeightNetwork(config)
        self._session = SchedulerSession(
            config.scheduler,
            config.node,
            self._reports,
            self._obey,
            self._events,
            config.cluster,
            self._network.relay_url,
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
            self._metrics.serve(self._config.metrics_port)
        connector = aiohttp.TCPConnector(limit=64)
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            stack.push_async_callback(self._network.close)
            self._build(await self._network.start(http, self._chain))
            self._start()
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
        assembly = Wiring(
            self._config, self._events, self._harvest, self._kill_switch,
            self._logs.records(GUEST_SAMPLES), self._host, self._guards, self._gpus,
            self._reclaimers,
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

    def _start(self) -> None:
        # Without its scheduler a node's leases run out: it looks for one for ever.
        self._background.start("session", self._session.run, restarts=None)
        self._background.start("guards", self._watch_guards, restarts=0)
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

    def _health(self) -> NodeHealth:
        return NodeHealth(
            self._logs.dropped, self._background.restarted(), self._background.running()
        )

    def _reports(self) -> list[rose_pb2.NodeReport]:
        watch = self._host.watch if self._host else None
        return build_reports(self._config, self._replicas, self._guards, watch)

    def _views(self) -> list[ReplicaFigures]:
        return [
            view_of(replica, self._guards.get(name), self._held(name))
            for name, replica in self._replicas.items()
        ]

    def _held(self, name: str) -> Held | None:
        reclaimer = self._reclaimers.get(name)
        return reclaimer.held() if reclaimer else None

    def _obey(self, command: rose_pb2.NodeCommand) -> None:
        match command.WhichOneof("command"):
            case "lease":
                if replica := self._replicas.get(command.lease.replica):
                    replica.lease(command.lease)
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
            case "relays":
                self._network.enrol(command.relays.urls)
            case other:
                self._events.write("command_ignored", command=other)
