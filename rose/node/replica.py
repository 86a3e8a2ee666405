"""One replica of a node: its engine, its lease agent and its policy version."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from rose.errors import RefusedError
from rose.logs.eventlog import EventLog, JsonlLog
from rose.node.config import ReplicaConfig
from rose.node.guest.supervisor import EngineState, Supervisor
from rose.node.lease_agent import LeaseAgent
from rose.node.lease_fsm import Ended, LeaseTakenBack
from rose.node.replica_client import ReplicaClient
from rose.node.telemetry.node_metrics import ReplicaPoller
from rose.node.weight_updates import Updates, WeightSource
from rose.process.background_tasks import Background
from rose.process.listening import exposed_at
from rose.rpc import rose_pb2

DRAIN_PATIENCE_S = 2.0
END_PATIENCE_S = 10.0


class Replica:
    """Replica of a node: joins supervisor, lease agent and weight updates.

    report: takes what the scheduler must hear. changed: called when offers say something new.
    url: where gateways send its turns. reachable: whether they find anybody there.
    """

    def __init__(
        self,
        config: ReplicaConfig,
        supervisor: Callable[["Replica"], Supervisor],
        source: WeightSource,
        activations: JsonlLog,
        events: EventLog,
        report: Callable[[rose_pb2.NodeReport], None],
        changed: Callable[[], None],
        url: str = "",
        reachable: Callable[[], bool] = lambda: True,
    ) -> None:
        self.config = config
        own = f"http://127.0.0.1:{config.port}"
        self.url = url or own
        self._reachable = reachable
        self._events = events
        self._report = report
        self._changed = changed
        self._client = client = ReplicaClient(source.session, own, lambda: self.supervisor.headers)
        self.lease_agent = LeaseAgent(config.id, client, events, self._lease_told, self._broken)
        self.updates = Updates(
            config.id,
            config.kind,
            client,
            source,
            activations,
            events,
            self._activated,
            self._unproven,
            self._start_anew,
        )
        self.gauge = ReplicaPoller(client, lambda: self.offered)
        self._trusted = True
        self.model = config.model_name
        self._wanted_model = self._started_model = config.model_name
        self.supervisor = supervisor(self)

    @property
    def version(self) -> int:
        """The policy version that its engine is proven to run."""
        return self.updates.version

    @property
    def job(self) -> str:
        """The job of that version, "" for the model as it was started."""
        return self.updates.job

    @property
    def near(self) -> list[str]:
        """Other models to which an update of the running engine leads."""
        folders = self.config.folders
        here = folders[self.model]
        others = (name for name in folders if name != self.model)
        return [name for name in others if same_architecture(here, folders[name])]

    @property
    def offered(self) -> bool:
        """True if the replica may be leased. One with old weights may be: it gets no turns yet."""
        healthy = self.supervisor.state is EngineState.HEALTHY
        return self._trusted and healthy and self._reachable()

    def lease(self, lease: rose_pb2.Lease, ttl_s: float) -> None:
        """Take a lease or its renewal for `ttl_s`, and come to the weights of its job."""
        model = lease.model or self.config.model_name
        if model not in self.config.folders:
            raise RefusedError(
                f"{lease.replica} was leased for model {model!r}, which it has no folder of;"
                " add it to the replica's `models`"
            )
        if not self.lease_agent.grant(lease.epoch, ttl_s, lease.job):
            return
        self._wanted_model = model
        other = model != self.model
        if other and model not in self.near:
            self._start_anew(f"job {lease.job} needs model {model}")
            other = False
        self.updates.serve(lease.job, lease.version, other_model=other)

    def start(self, background: Background) -> None:
        """Begin with what runs for as long as it does."""
        # A second supervisor would start another engine beside one that still runs.
        background.start(self._task("supervisor"), self.supervisor.run, restarts=0)
        background.start(self._task("lease"), self.lease_agent.run)
        # Without these two a replica gets stale, or its load is not known: nothing worse.
        background.start(self._task("updates"), self.updates.run, restarts=None)
        if self.config.kind != "guest":
            # A guest says it all on the control page, for nothing.
            background.start(self._task("gauge"), self.gauge.run, restarts=None)

    async def leave(self, background: Background, reason: str) -> None:
        """End all of it, while the node goes on."""
        names = [self._task(part) for part in ("supervisor", "lease", "updates", "gauge")]
        background.let_end(names)
        await self.stop(reason)
        # Its last act is to let go of the guest's record; cut off in it, it would leave a lock.
        await background.ended(self._task("supervisor"), END_PATIENCE_S)
        await background.end(names)

    def _task(self, part: str) -> str:
        return f"{self.config.id}: {part}"

    async def stop(self, reason: str) -> None:
        """Give the lease back, end its turns, then the engine."""
        self.lease_agent.take_back(reason)
        await self.lease_agent.settle(DRAIN_PATIENCE_S)
        await self.supervisor.stop()

    async def sleep(self) -> None:
        """Ask its engine to give up weights and KV. RefusedError, UnavailableError."""
        await self._client.sleep()

    async def entered(self, state: EngineState) -> None:
        """The engine's state changed. UnavailableError when a healthy one does not answer."""
        if state is EngineState.HEALTHY:
            said = await self._client.state()
            if (beyond := exposed_at(self.config.port)) is not None:
                # Whoever reaches it sends turns without a certificate.
                self._broken(f"it listens at {beyond} and not on loopback alone")
            elif said.proven:
                self._trusted = True
                self.lease_agent.engine_up(said.epoch, said.admitting)
                self.updates.engine_up(said.policy_version, said.job)
            else:
                self._broken("it does not know which weights it runs")
        else:
            self.lease_agent.engine_down()
            self.updates.engine_down()
            # The next life begins with the folder again, whatever this one was updated to.
            self.model = self._started_model
        self._log("engine_state", state=state.value)
        self._changed()

    def _lease_told(self, step: LeaseTakenBack | Ended) -> None:
        if isinstance(step, LeaseTakenBack):
            self._report(
                rose_pb2.NodeReport(
                    revocation=rose_pb2.Revocation(
                        replica=self.config.id, epoch=step.epoch, reason=step.reason
                    )
                )
            )
        elif step.asked:
            self._report(
                rose_pb2.NodeReport(
                    released=rose_pb2.Released(
                        replica=self.config.id, epoch=step.epoch, aborted=step.aborted
                    )
                )
            )

    def _start_anew(self, why: str) -> None:
        """Start the engine with the leased job's model; the lease lives on meanwhile."""
        if self.supervisor.state is not EngineState.HEALTHY and self.model == self._wanted_model:
            return  # That is what starts now.
        self.model = self._started_model = self._wanted_model
        self.updates.engine_down()
        self.lease_agent.switching(self.config.start_timeout_s)
        folder = self.config.folders[self.model]
        self._log("engine_switched", model=self.model, reason=why)
        self.supervisor.switch(replace(self.supervisor.spec, model_dir=folder), why)

    def _activated(self, job: str, version: int) -> None:
        if self.model != self._wanted_model and job == self.lease_agent.job:
            # Its weights are now those of the other model, which has the same architecture.
            self.model = self._wanted_model
        self._report(_activation(self.config.id, job, version, "", ok=True))

    def _unproven(self, version: int, why: str) -> None:
        self._report(_activation(self.config.id, self.lease_agent.job, version, why, ok=False))
        self._broken(f"version {version} is not proven")

    def _broken(self, reason: str) -> None:
        """No turn runs on an engine that does not do as told: end it, and start from the base."""
        self._trusted = False
        self.lease_agent.take_back(reason)
        self.supervisor.restart(reason)

    def _log(self, event: str, **fields: object) -> None:
        self._events.write(event, replica=self.config.id, **fields)


# Keys of a model's configuration that do not change the shape or meaning of its weights.
UNSHAPED = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version"})


@lru_cache(maxsize=256)
def same_architecture(one: Path, other: Path) -> bool:
    """Return True if two models differ in their weights alone. Unreadable ones never agree."""
    try:
        first, second = (
            {k: v for k, v in said.items() if k not in UNSHAPED}
            for said in (json.loads((f / "config.json").read_text()) for f in (one, other))
        )
    except (OSError, ValueError, AttributeError):
        return False
    return first == second


def _activation(
    replica: str, job: str, version: int, message: str, *, ok: bool
) -> rose_pb2.NodeReport:
    return rose_pb2.NodeReport(
        activation=rose_pb2.Activation(
            replica=replica, job=job, version=version, ok=ok, message=message
        )
    )
