"""NodeDaemon: assembles guard, supervisors, weight receiver and the scheduler session."""

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack

import aiohttp

from executor import ControlPage
from rose.errors import RoseError
from rose.eventlog import EventLog, JsonlLog
from rose.node.assembly import Assembly, HostSide
from rose.node.bringing import Source
from rose.node.chain import KnownVersion, VersionChain
from rose.node.config import NodeConfig
from rose.node.gpu import Gpus
from rose.node.guard_thread import GuardThread
from rose.node.harvest import HarvestState
from rose.node.host_watch import HostWatch
from rose.node.kill_switch import KillSwitch
from rose.node.live_metrics import ReplicaView
from rose.node.memory import Held
from rose.node.metrics import NodeMetrics
from rose.node.reclaimer import Reclaimer
from rose.node.relaying import WeightNetwork
from rose.node.replica import Replica
from rose.node.reports import build_reports, view_of
from rose.node.session import SchedulerSession
from rose.rpc import rose_pb2

STOPPING = "node stops"


class GuardDiedError(RoseError):
    """The grant loop broke; its guest is frozen and the node must be started anew."""


class NodeDaemon:
    """One node. `run` returns when `stop` was called and nothing it started is left."""

    def __init__(self, config: NodeConfig, gpus: Gpus | None = None) -> None:
        """Raises CardError where a replica's GPU cannot be used."""
        self._config = config
        self._gpus = gpus or Gpus()
        self._gpus.insist_all(config)
        self._events = EventLog(config.log_dir, config.node)
        self._chain = VersionChain()
        self._harvest = HarvestState()
        self._kill_switch = KillSwitch(config.kill_file)
        self._stopping = asyncio.Event()
        self._guard_broke = asyncio.Event()
        self._metrics = NodeMetrics(config.host, self._views)
        self._events.listen(self._metrics.heard)
        self._host: HostSide | None = None
        if config.host:
            page = ControlPage.ensure(config.host.page)
            watch = HostWatch(config.log_dir, self._metrics.served, page.latency.total)
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
        self._config.run_dir.mkdir(parents=True, exist_ok=True)
        if self._config.metrics_port:
            self._metrics.serve(self._config.metrics_port)
        connector = aiohttp.TCPConnector(limit=64)
        async with AsyncExitStack() as stack:
            http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            stack.push_async_callback(self._network.close)
            self._build(await self._network.start(http, self._chain))
            tasks = [asyncio.create_task(task) for task in self._tasks()]
            stopping = asyncio.create_task(self._stopping.wait())
            done, _ = await asyncio.wait((stopping, *tasks), return_when=asyncio.FIRST_COMPLETED)
            await self._end()
            for task in (stopping, *tasks):
                task.cancel()
            await asyncio.gather(stopping, *tasks, return_exceptions=True)
            for task in done - {stopping}:
                task.result()

    def _build(self, source: Source) -> None:
        activations = JsonlLog(self._config.log_dir / "activations.jsonl")
        assembly = Assembly(
            self._config, self._events, self._harvest, self._kill_switch, self._host, self._guards,
            self._gpus, self._reclaimers,
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

    def _tasks(self) -> list[Coroutine[None, None, None]]:
        replicas = [task for replica in self._replicas.values() for task in replica.tasks()]
        return [self._session.run(), self._watch_guards(), *replicas]

    async def _watch_guards(self) -> None:
        await self._guard_broke.wait()
        raise GuardDiedError("the grant loop broke; its guest is frozen: start the node again")

    async def _end(self) -> None:
        await asyncio.gather(*(replica.stop(STOPPING) for replica in self._replicas.values()))
        for guard in self._guards.values():
            guard.stop()
        self._metrics.close()
        self._events.write("node_stopped", node=self._config.node)

    def _reports(self) -> list[rose_pb2.NodeReport]:
        watch = self._host.watch if self._host else None
        return build_reports(self._config, self._replicas, self._guards, watch)

    def _views(self) -> list[ReplicaView]:
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
                    replica.tenant.grant(command.lease.epoch, command.lease.ttl_s)
            case "release":
                if replica := self._replicas.get(command.release.replica):
                    replica.tenant.release(command.release.epoch, command.release.reason)
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
