"""The demo's processes and their loopback ports: started together, watched, ended together.

Trainer, gateway and the dedicated engine share one core here, where each would have its own. An
engine that steps as often as it can makes small, wasteful batches and keeps the trainer from
publishing, so it yields to both: it loses no work, it makes larger batches.
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import aiohttp
import grpc
import psutil

from bench.common.engines import make_foreground, make_nicer
from bench.common.jsonl_process import JsonlProcess
from bench.demo.cli import JOB, DemoSettings, TrainerControl
from bench.demo.report.records import RunLayout
from executor.control_page.page import PAGE_FOLDER
from rose.engines import EngineKind, EngineProcess, EngineRole, EngineSpec, module_path
from rose.engines.launch import check_port
from rose.errors import EngineStartError, RoseError, UnavailableError
from rose.process.child import ManagedProcess, ProcessSpec
from rose.rpc import rose_pb2, rose_pb2_grpc
from weight_transfer import SigningKey

SERVING_CORE = 0
TRAINING_CORE = 1
GUEST, DEDICATED = "guest", "dedicated"
SERVING_NODE, TRAINING_NODE = "serving-0", "train-0"
MAX_SEQUENCES = 48
# Both replicas take so many together: neither waits for work while it may run.
STREAMS = 2 * MAX_SEQUENCES
# Several jobs have only the guest: a batch of each is half as large, and waits for it.
SHARED_STREAMS = MAX_SEQUENCES + 16
SHARED_GROUPS, SHARED_GROUP_SIZE = 8, 8
# A turn of a job's: many of them in a run, and each long enough to be worth its switch.
SHARED_HOLD_S = 10.0
# Longest wait of a turn for its job to have the guest.
SHARED_WAIT_S = 240.0
# No measured block is longer: it never hears its segment twice.
SEGMENT_S = 10.0
# Training goes on until it is told to finish.
MAX_STEPS = 1_000
# A minute on a quiet machine. Beside other work the guest, which yields to all of it, waits for
# what that leaves.
START_TIMEOUT_S = 480.0
# Rate of either replica alone on its core; live rates take over with the first tokens.
DECODE_TOK_S = 2_500.0
TTFT_TARGET_S, TPOT_TARGET_S = 0.5, 0.15
_FAULTY_WORKERS = {
    "stale-guest": "bench.demo.faulty_worker.StaleWorker",
    "wrong-chunk": "bench.demo.faulty_worker.WrongChunkWorker",
}
# Targets that no host misses: its slack is endless, so the gate never stops the guest.
NO_TARGET_S = 600.0
_NAME_FLAG = "--served-model-name="
DEDICATED_NICE = 10
CALL_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Ports:
    """Loopback ports of the demo's processes; one publisher for each job."""

    scheduler: int
    gateway: int
    host: int
    guest: int
    dedicated: int
    publishers: tuple[int, int]

    @classmethod
    def from_base(cls, base: int) -> "Ports":
        """Return consecutive ports."""
        scheduler, gateway, host, guest, dedicated, *publishers = range(base, base + 7)
        first, second = publishers
        return cls(scheduler, gateway, host, guest, dedicated, (first, second))

    def check(self) -> None:
        """Raise ConfigError when one is taken."""
        for name in ("scheduler", "gateway", "host", "guest", "dedicated"):
            check_port(getattr(self, name), name)
        for port in self.publishers:
            check_port(port, "publisher")


@dataclass(slots=True)
class Stack:
    """The running processes of one demo. `start` fills it, `stop` empties it."""

    settings: DemoSettings
    layout: RunLayout
    ports: Ports
    policy_dir: Path
    host_dir: Path
    processes: dict[str, ManagedProcess] = field(default_factory=dict)
    host: EngineProcess | None = None
    # By their jobs.
    trainers: dict[str, JsonlProcess] = field(default_factory=dict)
    load: JsonlProcess | None = None

    @property
    def scheduler(self) -> str:
        return f"127.0.0.1:{self.ports.scheduler}"

    @property
    def gateway_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.gateway}"

    @property
    def shared(self) -> bool:
        """True if several jobs have nothing but what is borrowed."""
        return self.settings.jobs > 1

    @property
    def replicas(self) -> tuple[str, ...]:
        """Engines that take turns."""
        return (GUEST,) if self.shared else (GUEST, DEDICATED)

    @property
    def roots(self) -> dict[str, int]:
        """Pids of everything started here, by name."""
        pids = {name: process.pid for name, process in self.processes.items()}
        if self.host:
            pids["host"] = self.host.process.pid
        pids |= {_trainer_name(job): each.process.pid for job, each in self.trainers.items()}
        return pids | ({"load": self.load.process.pid} if self.load else {})

    async def start(self) -> None:
        """Start every process without waiting for the slow ones."""
        key = SigningKey.generate()
        key_path = self.layout.scratch / "trainer.key"
        key.save(key_path)
        self.host = await EngineProcess.start(self.host_spec(self._page))
        log = (f"--log-dir={self.layout.logs}", "--log-file-bytes=0")
        # With one job the plan says when the guest is lent: what a lease is worth must not change
        # that.
        leasing = (
            ("--policy=rose", f"--hold-s={SHARED_HOLD_S}") if self.shared else ("--policy=spot",)
        )
        store = f"--store={self.layout.scratch / 'store.sqlite'}"
        port = f"--port={self.ports.scheduler}"
        more = ("--harvest=HOLD", "--cooldown-s=0.3", *leasing)
        await self._module("scheduler", "rose.main.scheduler", port, store, *log, *more)
        waits = (f"--queue-wait-s={SHARED_WAIT_S}", f"--version-wait-s={SHARED_WAIT_S}")
        port, scheduler = f"--port={self.ports.gateway}", f"--scheduler={self.scheduler}"
        more = waits if self.shared else ()
        await self._module("gateway", "rose.main.gateway", port, scheduler, *log, *more)
        faulty = self.settings.control in _FAULTY_WORKERS
        module = "bench.demo.faulty_node" if faulty else "rose.main.node"
        config = self._config(SERVING_NODE, self.serving_node(self._page, key.verify_key.hex))
        await self._module(SERVING_NODE, module, *config, core=SERVING_CORE)
        if DEDICATED in self.replicas:
            replica = self._replica(DEDICATED, self.ports.dedicated, (TRAINING_CORE,))
            node = self._node(TRAINING_NODE, replica, key.verify_key.hex)
            config = self._config(TRAINING_NODE, node)
            await self._module(TRAINING_NODE, "rose.main.node", *config)
        for number, job in enumerate(self.settings.job_names):
            trainer = self._trainer(job, number, key_path)
            self.trainers[job] = await self._child(
                _trainer_name(job), "bench.demo.training.main", trainer
            )
        self.load = await self._child("load", "bench.load.generator", self._load())

    async def wait_host(self, timeout_s: float) -> None:
        """Return once the host serves."""
        assert self.host is not None
        await self.host.wait_healthy(timeout_s)

    def check(self) -> None:
        """Raise when a process that must run has ended."""
        for name, process in self.processes.items():
            if process.returncode is not None:
                raise EngineStartError(
                    f"{name} ended (exit {process.returncode}): {last_line(process.spec.log)}"
                )
        if self.host and self.host.process.returncode is not None:
            raise EngineStartError(f"the host engine ended: {self.host.last_words()}")

    async def stop(self) -> None:
        """End the trainer and the load, then nodes (which end their engines), then the rest."""
        for child in (*([self.load] if self.load else []), *self.trainers.values()):
            await child.stop()
        await asyncio.gather(*(process.stop(grace_s=15.0) for process in self.processes.values()))
        if self.host:
            await self.host.stop()
        self._page.unlink(missing_ok=True)

    async def _module(
        self, name: str, module: str, *arguments: str, core: int = TRAINING_CORE
    ) -> None:
        argv = (sys.executable, "-m", module, *arguments)
        log = self.layout.logs / f"{name}.log"
        spec = ProcessSpec(name=name, argv=argv, log=log, cores=(core,))
        self.processes[name] = await ManagedProcess.start(spec)

    async def _child(self, name: str, module: str, config: dict[str, object]) -> JsonlProcess:
        return await JsonlProcess.start(
            ProcessSpec(
                name=name,
                argv=(sys.executable, "-m", module, *self._config(name, config)),
                env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                log=self.layout.logs / f"{name}.log",
                cores=(TRAINING_CORE,),
                piped=True,
            )
        )

    def _config(self, name: str, config: dict[str, object]) -> tuple[str, str]:
        """Write a configuration; returns the options that name it."""
        path = self.layout.scratch / f"{name}.json"
        path.write_text(json.dumps(config, indent=1))
        return "--config", str(path)

    @property
    def _page(self) -> Path:
        return Path(PAGE_FOLDER, f"rose-demo-{os.getpid()}.page")

    def _targets_s(self) -> dict[str, float]:
        naive = self.settings.control == "naive"
        usual = {"ttft_target_s": TTFT_TARGET_S, "tpot_target_s": TPOT_TARGET_S}
        return dict.fromkeys(usual, NO_TARGET_S) if naive else usual

    def _interpreter(self, engine: str) -> tuple[Path | None, dict[str, str]]:
        """Return an engine's interpreter, None for this one, and how another one finds ROSE."""
        if engine != "sglang":
            return None, {}
        path = module_path(self.layout.scratch / "metadata")
        return self.settings.sglang_python.absolute(), {"PYTHONPATH": path}

    @property
    def _serving_cores(self) -> tuple[int, ...]:
        """One for each rank of host and guest; the second is the trainer's, too."""
        return (SERVING_CORE, TRAINING_CORE)[: self.settings.tensor_parallel]

    def host_spec(self, page: Path) -> EngineSpec:
        """Return the host's engine."""
        python, environment = self._interpreter(self.settings.host)
        targets_s = self._targets_s()
        return EngineSpec(
            name="host",
            role=EngineRole.HOST,
            model_dir=self.settings.host_model or self.host_dir,
            port=self.ports.host,
            log=self.layout.logs / "engine-host.log",
            cores=self._serving_cores,
            tensor_parallel=self.settings.tensor_parallel,
            control_page=page,
            engine=EngineKind(self.settings.host),
            python=python,
            extra_env=environment,
            ttft_target_s=targets_s["ttft_target_s"],
            tpot_target_s=targets_s["tpot_target_s"],
        )

    def serving_node(self, page: Path, verify_key: str) -> dict[str, object]:
        """Return the file of the node that guards the host."""
        guest = self._replica(GUEST, self.ports.guest, self._serving_cores)
        if worker := _FAULTY_WORKERS.get(self.settings.control or ""):
            guest["worker"] = worker
        guest["slack_share"] = 1.0 if self.settings.control == "naive" else 0.0
        host = {
            "page": str(page),
            "pid": self.host.process.pid if self.host else None,
            "engine": self.settings.host,
            **self._targets_s(),
        }
        return self._node(SERVING_NODE, guest, verify_key) | {"host": host}

    def _node(self, name: str, replica: dict[str, object], verify_key: str) -> dict[str, object]:
        return {
            "node": name,
            "scheduler": self.scheduler,
            "run_dir": str(self.layout.scratch / name),
            "log_dir": str(self.layout.node(name)),
            # Every figure is computed from these records.
            "logs": {"file_bytes": None},
            "replicas": [replica],
            "verify_key": verify_key,
        }

    def _replica(self, name: str, port: int, cores: tuple[int, ...]) -> dict[str, object]:
        found: dict[str, object] = {
            "id": name,
            "kind": name,
            "model_dir": str(self.policy_dir),
            "port": port,
            "cores": cores,
            "tensor_parallel": len(cores),
            "max_sequences": MAX_SEQUENCES,
            "stream_interval": 4,
            "start_timeout_s": START_TIMEOUT_S,
            "decode_tok_s": DECODE_TOK_S,
        }
        python, environment = self._interpreter(self.settings.guest)
        if python is not None:
            found |= {"engine": self.settings.guest, "engine_python": str(python)}
            found["extra_env"] = environment
        return found

    def _trainer(self, job: str, number: int, key_path: Path) -> dict[str, object]:
        control = self.settings.control
        groups = {"groups": SHARED_GROUPS, "group_size": SHARED_GROUP_SIZE} if self.shared else {}
        return {
            "job": job,
            "seed": self.settings.seed + number,
            "model_dir": str(self.policy_dir),
            "gateway_url": self.gateway_url,
            "scheduler": self.scheduler,
            # Records of several trainers are merged with all others when the run ends.
            "out": str(self.layout.logs / job if self.shared else self.layout.out),
            "publish_root": str(self.layout.scratch / "published" / job),
            "publish_port": self.ports.publishers[number],
            "streams": SHARED_STREAMS if self.shared else STREAMS,
            "shared": self.shared,
            **groups,
            "steps": MAX_STEPS,
            "held_out_maps": self.settings.held_out_maps,
            "decay_steps": self.settings.steps,
            "control": control if control in get_args(TrainerControl) else None,
            "long_turns": self.settings.long_turns,
            "torch_threads": 1,
            "key": str(key_path),
        }

    def _load(self) -> dict[str, object]:
        trace = self.settings.trace
        return {
            "url": f"http://127.0.0.1:{self.ports.host}",
            "model": "host",
            "out": str(self.layout.out / "client_requests.jsonl"),
            "seed": self.settings.seed,
            "trace": str(trace) if trace else None,
            "segment_s": SEGMENT_S,
            # Many short bursts: each block has some, so blocks are alike.
            "burst_s": 0.6,
            "min_prompt_tokens": 24,
            "max_prompt_tokens": 72,
            "min_output_tokens": 3,
            "max_output_tokens": 6,
        }


def _trainer_name(job: str) -> str:
    """Return the name of a job's trainer among the processes."""
    return "trainer" if job == JOB else f"trainer{job.removeprefix(JOB)}"


def last_line(log: Path | None) -> str:
    """Return the last line that a process wrote."""
    lines = log.read_text(errors="replace").splitlines() if log and log.is_file() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it wrote no log")


def trees(roots: Mapping[str, int]) -> Iterator[tuple[str, psutil.Process]]:
    """Every process of the run with the name it counts under.

    roots: pids of the processes that the demo started. An engine that a node daemon runs counts
    under its own name, what else a process starts counts under its parent's.
    """
    for name, pid in roots.items():
        try:
            root = psutil.Process(pid)
            yield name, root
            for child in root.children():
                label = engine_name(child) or name
                yield label, child
                for descendant in child.children(recursive=True):
                    yield label, descendant
        except psutil.NoSuchProcess:
            continue


def engine_name(process: psutil.Process) -> str | None:
    """The served name of an engine's API process, None for any other process."""
    try:
        arguments = process.cmdline()
    except psutil.Error:
        return None
    names = [a.removeprefix(_NAME_FLAG) for a in arguments if a.startswith(_NAME_FLAG)]
    return names[0] if names else None


def cpu_seconds(roots: Mapping[str, int]) -> dict[str, float]:
    """User and system time of each name since its processes started."""
    total: dict[str, float] = {}
    for name, process in trees(roots):
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total[name] = total.get(name, 0.0) + times.user + times.system
    return total


def memory_bytes(roots: Mapping[str, int]) -> dict[str, int]:
    """Proportional set size of each name: shared pages count once over the whole run."""
    total: dict[str, int] = {}
    for name, process in (*trees(roots), ("demo", psutil.Process(os.getpid()))):
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except OSError:
            continue
        kilobytes = next(
            (int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")), 0
        )
        total[name] = total.get(name, 0) + kilobytes * 1024
    return total


def engine_pid(roots: Mapping[str, int], name: str) -> int | None:
    """Pid of the API process of the engine that serves under `name`."""
    for label, process in trees(roots):
        if label == name and engine_name(process) == name:
            return process.pid
    return None


def yield_to_trainer(roots: Mapping[str, int], engine: str) -> None:
    """Lower the priority of every thread of `engine`."""
    for pid in _processes_of(roots, engine):
        make_nicer(pid, DEDICATED_NICE)


def level_with_host(roots: Mapping[str, int], engine: str) -> None:
    """Give every thread of `engine` the priority that the host has: naive co-location.

    Raises RoseError when the machine does not allow it.
    """
    try:
        for pid in _processes_of(roots, engine):
            make_foreground(pid)
    except PermissionError as error:
        raise RoseError(
            "--control naive raises the guest's priority to the host's, which needs root"
        ) from error


def _processes_of(roots: Mapping[str, int], engine: str) -> list[int]:
    return [process.pid for name, process in trees(roots) if name == engine]


@dataclass(frozen=True, slots=True)
class GatewayFigures:
    """Counters of the gateway; all but `live_turns` and `waiting` only grow."""

    tokens: dict[str, int] = field(default_factory=dict)
    live_turns: dict[str, int] = field(default_factory=dict)
    continuations: int = 0


class Watcher:
    """Asks the scheduler and the gateway; raises UnavailableError when one is silent."""

    def __init__(self, scheduler: str, gateway_url: str) -> None:
        self._channel = grpc.aio.insecure_channel(scheduler)
        self._scheduler = rose_pb2_grpc.SchedulerStub(self._channel)
        self._gateway_url = gateway_url
        timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
        self._http = aiohttp.ClientSession(timeout=timeout)

    async def snapshot(self) -> rose_pb2.SnapshotReply:
        """The scheduler's view of everything."""
        try:
            return await self._scheduler.Snapshot(
                rose_pb2.SnapshotRequest(), timeout=CALL_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise UnavailableError(f"the scheduler does not answer: {error.details()}") from error

    async def harvest(self, mode: rose_pb2.HarvestMode.ValueType) -> None:
        """Let guests be leased, or not."""
        request = rose_pb2.SetHarvestRequest(mode=mode)
        await self._scheduler.SetHarvest(request, timeout=CALL_TIMEOUT_S)

    async def revoke(self, replica: str, reason: str) -> int:
        """Take a replica's lease; returns the epoch that ended."""
        request = rose_pb2.RevokeRequest(replica=replica, reason=reason)
        reply = await self._scheduler.Revoke(request, timeout=CALL_TIMEOUT_S)
        return reply.epoch

    async def gateway(self) -> GatewayFigures:
        try:
            async with self._http.get(f"{self._gateway_url}/rose/v1/stats") as response:
                body: dict[str, Any] = await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise UnavailableError(f"the gateway does not answer: {error!r}") from error
        return GatewayFigures(body["tokens"], body["live_turns"], body["continuations"])

    async def aclose(self) -> None:
        await self._http.close()
        await self._channel.close(None)


def replica_of(snapshot: rose_pb2.SnapshotReply, name: str) -> rose_pb2.Replica | None:
    """One replica of a snapshot."""
    return next((replica for replica in snapshot.replicas if replica.id == name), None)
