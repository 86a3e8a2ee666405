"""NodeDaemon: assembles guard, supervisors, weight receiver and the scheduler session."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial

import aiohttp

from executor import ControlPage, GuardConfig, GuardCore, PageUnreadable
from rose.errors import RoseError
from rose.eventlog import EventLog, JsonlLog
from rose.node.chain import KnownVersion, VersionChain
from rose.node.config import HostConfig, NodeConfig, ReplicaConfig
from rose.node.guard_thread import GuardThread
from rose.node.harvest import HarvestState
from rose.node.host_watch import HostWatch
from rose.node.replica import Replica
from rose.node.reports import build_reports
from rose.node.session import SchedulerSession
from rose.node.supervisor import Supervisor
from rose.node.updates import Source
from rose.rpc import rose_pb2
from weight_transfer import ChunkStore, VerifyKey

STOPPING = "node stops"


class GuardDiedError(RoseError):
    """The grant loop broke; its guest is frozen and the node must be started anew."""


class NodeDaemon:
    """One node. `run` returns when `stop` was called and nothing it started is left."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._events = EventLog(config.log_dir, config.node)
        self._chain = VersionChain()
        self._harvest = HarvestState()
        self._stopping = asyncio.Event()
        self._guard_broke = asyncio.Event()
        self._page = ControlPage.ensure(config.host.page) if config.host else None
        self._watch = HostWatch(config.log_dir) if config.host else None
        self._guards: dict[str, GuardThread] = {}
        self._replicas: dict[str, Replica] = {}
        self._session = SchedulerSession(
            config.scheduler, config.node, self._reports, self._obey, self._events
        )

    def stop(self) -> None:
        """Drain, end every engine, and let `run` return."""
        self._stopping.set()

    async def run(self) -> None:
        """Serve until stopped. Raises what broke, once everything it started is ended."""
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
        source = Source(http, store, self._chain, key)
        activations = JsonlLog(self._config.log_dir / "activations.jsonl")
        for config in self._config.replicas:
            self._replicas[config.id] = Replica(
                config,
                self._supervisor_of(config),
                source,
                activations,
                self._events,
                self._session.say,
                self._session.changed,
            )
            if config.kind == "guest" and self._config.host:
                self._guards[config.id] = self._guard_of(config, self._config.host)
        self._events.write("node_started", node=self._config.node)

    def _supervisor_of(self, config: ReplicaConfig) -> Callable[[Replica], Supervisor]:
        page = self._config.host.page if self._config.host else None
        log = self._config.log_dir / f"engine-{config.id}.log"
        spec = config.engine(log, page, self._config.verify_key)
        guest = config.kind == "guest"
        return lambda replica: Supervisor(
            spec,
            config.start_timeout_s,
            self._events,
            replica.entered,
            blocked=(lambda: self._barred(replica)) if guest else lambda: False,
        )

    def _barred(self, guest: Replica) -> bool:
        """Whether the guest may not exist now. The kill switch waits for nothing."""
        if self._config.kill_file.exists():
            return True
        # Without a right to exist it still may finish handing its turns back.
        return guest.tenant.core.vacant and not self._harvest.wants(guest.config.id)

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
            self._replicas[config.id].tenant.active,
            self._config.kill_file,
            host.pid,
            self._watch,
            self._config.log_dir,
            self._events,
            partial(asyncio.get_running_loop().call_soon_threadsafe, self._guard_broke.set),
        )
        guard.start()
        return guard

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
        self._events.write("node_stopped", node=self._config.node)

    def _reports(self) -> list[rose_pb2.NodeReport]:
        return build_reports(self._config, self._replicas, self._guards, self._watch)

    def _obey(self, command: rose_pb2.NodeCommand) -> None:
        match command.WhichOneof("command"):
            case "lease":
                if replica := self._replicas.get(command.lease.replica):
                    replica.tenant.grant(command.lease.epoch, command.lease.ttl_s)
            case "release":
                if replica := self._replicas.get(command.release.replica):
                    replica.tenant.release(command.release.epoch, command.release.reason)
            case "version":
                known = command.version
                self._chain.add(KnownVersion(known.job, known.version, known.parent, known.url))
                for replica in self._replicas.values():
                    replica.updates.wake()
            case "harvest":
                self._harvest.take(command.harvest)
            case other:
                self._events.write("command_ignored", command=other)
