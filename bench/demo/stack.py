"""The demo's processes and their loopback ports: started together, ended together."""

import asyncio
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from bench.demo.cli import JOB, DemoSettings, TrainerControl
from bench.demo.report.records import RunLayout
from executor.control_page.page import PAGE_FOLDER
from rose.engines import EngineKind, EngineProcess, EngineRole, EngineSpec, module_path
from rose.engines.launch import check_port
from rose.errors import EngineStartError
from rose.process.child import JsonlProcess, ManagedProcess, ProcessSpec
from weight_transfer import SigningKey


@dataclass(frozen=True, slots=True)
class Ports:
    """Loopback ports of the demo's processes."""

    scheduler: int
    gateway: int
    host: int
    guest: int
    dedicated: int
    publisher: int
    second_publisher: int

    @classmethod
    def from_base(cls, base: int) -> "Ports":
        """Consecutive ports."""
        return cls(*range(base, base + 7))

    def check(self) -> None:
        """Raise ConfigError when one is taken."""
        for name in self.__slots__:
            check_port(getattr(self, name), name)


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


@dataclass(slots=True)
class Stack:
    """The running processes of one demo. `start_*` fill it, `stop` empties it."""

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
    def replicas(self) -> tuple[str, ...]:
        """Engines that take turns: several jobs have nothing but what is borrowed."""
        return (GUEST, DEDICATED) if self.settings.jobs == 1 else (GUEST,)

    @property
    def roots(self) -> dict[str, int]:
        """Pids of everything started here, by name."""
        pids = {name: process.pid for name, process in self.processes.items()}
        if self.host:
            pids["host"] = self.host.process.pid
        children = {_trainer_name(job): child for job, child in self.trainers.items()}
        if self.load:
            children["load"] = self.load
        for name, child in children.items():
            pids[name] = child.process.pid
        return pids

    async def start(self) -> None:
        """Start every process without waiting for the slow ones."""
        key = SigningKey.generate()
        key_path = self.layout.scratch / "trainer.key"
        key.save(key_path)
        page = self._page
        self.host = await EngineProcess.start(self._host_spec(page))
        await self._module("scheduler", "rose.main.scheduler", self._scheduler_args())
        await self._module("gateway", "rose.main.gateway", self._gateway_args())
        nodes = {SERVING_NODE: (SERVING_CORE, self.serving_node(page, key.verify_key.hex))}
        if DEDICATED in self.replicas:
            nodes[TRAINING_NODE] = (TRAINING_CORE, self._training_node(key.verify_key.hex))
        for name, (core, config) in nodes.items():
            path = self._write_config(name, config)
            faulty = name == SERVING_NODE and self.settings.control in _FAULTY_WORKERS
            module = "bench.demo.faulty_node" if faulty else "rose.main.node"
            await self._module(name, module, ["--config", str(path)], core)
        for number, job in enumerate(self.settings.job_names):
            self.trainers[job] = await self._child(
                _trainer_name(job), "bench.demo.training.main", self._trainer(job, number, key_path)
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
        self, name: str, module: str, arguments: list[str], core: int = TRAINING_CORE
    ) -> None:
        self.processes[name] = await ManagedProcess.start(
            ProcessSpec(
                name=name,
                argv=(sys.executable, "-m", module, *arguments),
                log=self.layout.logs / f"{name}.log",
                core=core,
            )
        )

    async def _child(self, name: str, module: str, config: dict[str, object]) -> JsonlProcess:
        path = self._write_config(name, config)
        return await JsonlProcess.start(
            ProcessSpec(
                name=name,
                argv=(sys.executable, "-m", module, "--config", str(path)),
                env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
                log=self.layout.logs / f"{name}.log",
                core=TRAINING_CORE,
                piped=True,
            )
        )

    def _write_config(self, name: str, config: dict[str, object]) -> Path:
        path = self.layout.scratch / f"{name}.json"
        path.write_text(json.dumps(config, indent=1))
        return path

    @property
    def _page(self) -> Path:
        return Path(PAGE_FOLDER, f"rose-demo-{os.getpid()}.page")

    def _host_spec(self, page: Path) -> EngineSpec:
        return EngineSpec(
            name="host",
            role=EngineRole.HOST,
            model_dir=self.settings.host_model or self.host_dir,
            port=self.ports.host,
            log=self.layout.logs / "engine-host.log",
            core=SERVING_CORE,
            control_page=page,
            ttft_target_s=self._target_s(TTFT_TARGET_S),
            tpot_target_s=self._target_s(TPOT_TARGET_S),
            engine=EngineKind(self.settings.host),
            python=self._python(self.settings.host),
            extra_env=self._environment(self.settings.host),
        )

    def _python(self, engine: str) -> Path | None:
        """Return the engine's interpreter, None for this one."""
        return self.settings.sglang_python.absolute() if engine == "sglang" else None

    def _environment(self, engine: str) -> dict[str, str]:
        """Return the environment in which another interpreter finds ROSE."""
        if engine != "sglang":
            return {}
        return {"PYTHONPATH": module_path(self.layout.scratch / "metadata")}

    def _target_s(self, usual_s: float) -> float:
        return NO_TARGET_S if self.settings.control == "naive" else usual_s

    def _scheduler_args(self) -> list[str]:
        return [
            f"--port={self.ports.scheduler}",
            f"--store={self.layout.scratch / 'store.sqlite'}",
            f"--log-dir={self.layout.logs}",
            "--log-file-bytes=0",
            "--harvest=HOLD",
            "--cooldown-s=0.3",
            *self._leasing(),
        ]

    def _leasing(self) -> list[str]:
        if self.settings.jobs > 1:
            return ["--policy=rose", f"--hold-s={SHARED_HOLD_S}"]
        # The plan says when the guest is lent: what a lease is worth must not change that.
        return ["--policy=spot"]

    def _gateway_args(self) -> list[str]:
        return [
            f"--port={self.ports.gateway}",
            f"--scheduler={self.scheduler}",
            f"--log-dir={self.layout.logs}",
            "--log-file-bytes=0",
            *self._waits(),
        ]

    def _waits(self) -> list[str]:
        if self.settings.jobs == 1:
            return []
        return [f"--queue-wait-s={SHARED_WAIT_S}", f"--version-wait-s={SHARED_WAIT_S}"]

    def serving_node(self, page: Path, verify_key: str) -> dict[str, object]:
        """Return the file of the node that guards the host."""
        guest = self._replica(GUEST, self.ports.guest, SERVING_CORE)
        if worker := _FAULTY_WORKERS.get(self.settings.control or ""):
            guest["worker"] = worker
        guest["slack_share"] = 1.0 if self.settings.control == "naive" else 0.0
        host = {
            "page": str(page),
            "pid": self.host.process.pid if self.host else None,
            "engine": self.settings.host,
            "ttft_target_s": self._target_s(TTFT_TARGET_S),
            "tpot_target_s": self._target_s(TPOT_TARGET_S),
        }
        return self._node(SERVING_NODE, guest, verify_key) | {"host": host}

    def _training_node(self, verify_key: str) -> dict[str, object]:
        replica = self._replica(DEDICATED, self.ports.dedicated, TRAINING_CORE)
        return self._node(TRAINING_NODE, replica, verify_key)

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

    def _replica(self, name: str, port: int, core: int) -> dict[str, object]:
        return {
            "id": name,
            "kind": name,
            "model_dir": str(self.policy_dir),
            "port": port,
            "core": core,
            "max_sequences": MAX_SEQUENCES,
            "stream_interval": 4,
            "start_timeout_s": START_TIMEOUT_S,
            "decode_tok_s": DECODE_TOK_S,
            **self._engine(self.settings.guest),
        }

    def _engine(self, engine: str) -> dict[str, object]:
        python = self._python(engine)
        if python is None:
            return {}
        return {
            "engine": engine,
            "engine_python": str(python),
            "extra_env": self._environment(engine),
        }

    def _trainer(self, job: str, number: int, key_path: Path) -> dict[str, object]:
        control = self.settings.control
        shared = self.settings.jobs > 1
        return {
            "job": job,
            "seed": self.settings.seed + number,
            "model_dir": str(self.policy_dir),
            "gateway_url": self.gateway_url,
            "scheduler": self.scheduler,
            # Records of several trainers are merged with all others when the run ends.
            "out": str(self.layout.logs / job if shared else self.layout.out),
            "publish_root": str(self.layout.scratch / "published" / job),
            "publish_port": (self.ports.publisher, self.ports.second_publisher)[number],
            "streams": SHARED_STREAMS if shared else STREAMS,
            "shared": shared,
            **({"groups": SHARED_GROUPS, "group_size": SHARED_GROUP_SIZE} if shared else {}),
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
