"""NodeDaemon: assembles guard, supervisors, weight receiver and the scheduler session."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine

import aiohttp

from executor import ControlPage, GuardConfig, GuardCore, PageUnreadable
from rose.eventlog import EventLog, JsonlLog
from rose.node.chain import KnownVersion, VersionChain
from rose.node.config import HostConfig, NodeConfig, ReplicaConfig
from rose.node.guard_thread import GuardThread
from rose.node.host_watch import HostWatch
from rose.node.replica import Replica
from rose.node.reports import build_reports, released
from rose.node.session import SchedulerSession
from rose.node.supervisor import Supervisor
from rose.rpc import rose_pb2
from weight_transfer import ChunkStore, VerifyKey


class NodeDaemon:
    """One node. `run` returns when `stop` was called and nothing it started is left."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._events = EventLog(config.log_dir, config.node)
        self._chain = VersionChain()
        self._stopping = asyncio.Event()
        self._page = ControlPage.ensure(config.host.page) if config.host else None
        self._watch = HostWatch(config.log_dir) if config.host else None
        self._guards: dict[str, GuardThread] = {}
        self._replicas: dict[str, Replica] = {}
        self._session: SchedulerSession | None = None

    def stop(self) -> None:
        """Drain, end every engine, and let `run` return."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until stopped."""
        self._config.run_dir.mkdir(parents=True, exist_ok=True)
        connector = aiohttp.TCPConnector(limit=64)
        async with aiohttp.ClientSession(connector=connector) as http:
            self._build(http)
            tasks = [asyncio.create_task(task) for task in self._tasks()]
            stopping = asyncio.create_task(self._stopping.wait())
            done, _ = await asyncio.wait((stopping, *tasks), return_when=asyncio.FIRST_COMPLETED)
            await self._end()
            for task in (stopping, *tasks):
                task.cancel()
            await asyncio.gather(stopping, *tasks, return_exceptions=True)
            for task in done - {stopping}:
                task.result()

    def _build(self, http: aiohttp.ClientSession) -> None:
        store = ChunkStore(self._config.run_dir / "weights")
        key = VerifyKey(self._config.verify_key) if self._config.verify_key else None
        activations = JsonlLog(self._config.log_dir / "activations.jsonl")
        self._session = SchedulerSession(
            self._config.scheduler, self._config.node, self._reports, self._obey, self._events
        )
        for config in self._config.replicas:
            self._replicas[config.id] = Replica(
                config,
                self._supervisor_of(config),
                http,
                store,
                self._chain,
                key,
                activations,
                self._events,
                self._session.changed,
            )
            if config.kind == "guest" and self._config.host:
                self._guards[config.id] = self._guard_of(config, self._config.host)
        self._events.write("node_started", node=self._config.node)

    def _supervisor_of(self, config: ReplicaConfig) -> Callable[..., Supervisor]:
        page = self._config.host.page if self._config.host else None
        log = self._config.log_dir / f"engine-{config.id}.log"
        spec = config.engine(log, page, self._config.verify_key)
        guest = config.kind == "guest"
        return lambda on_change: Supervisor(
            spec,
            config.start_timeout_s,
            self._events,
            on_change,
            blocked=self._config.kill_file.exists if guest else lambda: False,
        )

    def _guard_of(self, config: ReplicaConfig, host: HostConfig) -> GuardThread:
        assert self._page is not None
        assert self._watch is not None
        limits = GuardConfig(
            token_budget=config.token_budget,
            max_sequences=config.max_sequences,
            slack_share=config.slack_share,
        )
        try:
            previous = self._page.grant.read()
        except PageUnreadable:
            previous = None
        guard = GuardThread(
            self._page,
            GuardCore(limits, previous),
            self._replicas[config.id].lease_active,
            self._config.kill_file,
            host.pid,
            self._watch,
            self._config.log_dir,
            self._events,
        )
        guard.start()
        return guard

    def _tasks(self) -> list[Coroutine[None, None, None]]:
        assert self._session is not None
        replicas = self._replicas.values()
        return [
            self._session.run(),
            *(replica.supervisor.run() for replica in replicas),
            *(replica.keep_current() for replica in replicas),
        ]

    async def _end(self) -> None:
        for replica in self._replicas.values():
            with contextlib.suppress(aiohttp.ClientError):
                await replica.release(replica.lease.epoch, "node stops")
        await asyncio.gather(*(r.supervisor.stop() for r in self._replicas.values()))
        for guard in self._guards.values():
            guard.stop()
        self._events.write("node_stopped", node=self._config.node)

    def _reports(self) -> list[rose_pb2.NodeReport]:
        return build_reports(self._config, self._replicas, self._guards, self._watch)

    async def _obey(self, command: rose_pb2.NodeCommand) -> list[rose_pb2.NodeReport]:
        match command.WhichOneof("command"):
            case "lease":
                replica = self._replicas.get(command.lease.replica)
                if replica:
                    await replica.grant(command.lease.epoch, command.lease.ttl_s)
            case "release":
                return await self._release(command.release)
            case "version":
                known = command.version
                self._chain.add(KnownVersion(known.version, known.parent, known.url))
                for replica in self._replicas.values():
                    replica.wake()
            case other:
                self._events.write("command_ignored", command=other)
        return []

    async def _release(self, release: rose_pb2.Release) -> list[rose_pb2.NodeReport]:
        replica = self._replicas.get(release.replica)
        if replica is None:
            return []
        aborted = await replica.release(release.epoch, release.reason)
        return [released(self._config.node, release.replica, release.epoch, aborted)]
