"""Host, ROSE guest and stock guest: engine cores on one core, everything else on the other."""

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import numpy as np
import psutil

from bench.common.engines import EngineSet, pin
from bench.common.tiny_models import TinyModel
from bench.coserve.plan import EVENTS, GUEST, HOST, NAIVE, BenchSettings
from bench.coserve.player import Drill
from executor.step_log import STEP_LOG
from rose.engines import EngineKind, EngineProcess, EngineRole, EngineSpec, module_path
from rose.errors import EngineStartError, RefusedError, UnavailableError
from rose.logs.eventlog import JsonlLog
from rose.node.replica_client import ReplicaClient
from weight_transfer import ChunkStore, SigningKey, TensorBits, VersionPublisher, read_model_dir

START_TIMEOUT_S = 300.0
HOST_SEQUENCES = 64
NAMES = (HOST, GUEST, NAIVE)
# Another interpreter finds ROSE's plugins by this folder.
METADATA = "metadata"
# The host's step takes long enough that computing outweighs bookkeeping, and short enough that a
# thousand requests an arm fit into the run; in fp32 a request has the same tokens in any batch.
HOST_MODEL, GUEST_MODEL = "bench-host", "bench-guest"
MODELS = {
    HOST_MODEL: TinyModel(hidden=384, layers=6, heads=6, mlp=1056, vocabulary=320),
    GUEST_MODEL: TinyModel(
        hidden=256, layers=4, heads=4, mlp=704, vocabulary=320, dtype="bfloat16"
    ),
}
# Arms replay the same prompts, so the prefix cache is off; sampling is as requested.
HOST_ARGS: Final = {
    EngineKind.VLLM: ("--no-enable-prefix-caching", "--generation-config=vllm"),
    EngineKind.SGLANG: ("--disable-radix-cache", "--sampling-defaults=openai", "--enable-metrics"),
}
STOCK_ARGS: Final = {
    EngineKind.VLLM: ("--generation-config=vllm",),
    EngineKind.SGLANG: ("--sampling-defaults=openai", "--enable-metrics"),
}
# Names of the processes that schedule and compute; a rank of several has its number in its name.
CORES: Final = "EngineCore", "sglang::scheduler", "Worker_TP"
# The host is started again with other targets once its own latencies are measured.
FIRST_TTFT_S, FIRST_TPOT_S = 0.5, 0.15
# Events happen after this share of their window: before it the guest runs as usual.
WHEN = 1 / 3
# A step of training changes this share of the weights, by one unit in the last place.
CHANGED_SHARE = 0.05


@dataclass(slots=True, kw_only=True)
class Engines(EngineSet):
    """The three engines of a run; `start_*` fill it, `stop` ends them."""

    settings: BenchSettings
    page: Path
    logs: Path
    key: SigningKey
    store: Path
    ports: Mapping[str, int] = field(init=False)
    cores: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        available = sorted(os.sched_getaffinity(0))
        self.cores = (available[0], available[-1])
        self.ports = {name: self.settings.port_base + at for at, name in enumerate(NAMES)}

    @property
    def model_root(self) -> Path:
        """Folder in which the models are kept between runs."""
        return self.settings.out / "models"

    async def start_all(self) -> None:
        """Start the three in parallel, on all cores; then pin them."""
        first = self.settings.ttft_target_s or FIRST_TTFT_S, self.settings.tpot_target_s
        specs = (self._host(first[0], first[1] or FIRST_TPOT_S), self._guest(), self._naive())
        await self.start_together(specs, START_TIMEOUT_S, self.logs)
        for name in self.running:
            self.place(name)
        os.sched_setaffinity(0, {self.cores[1]})

    async def restart_host(self, ttft_s: float, tpot_s: float) -> None:
        """Restart the host with other targets."""
        await self.running[HOST].stop()
        os.sched_setaffinity(0, set(self.cores))
        self.running[HOST] = await EngineProcess.start(self._host(ttft_s, tpot_s))
        os.sched_setaffinity(0, {self.cores[1]})
        await self.running[HOST].wait_healthy(START_TIMEOUT_S)
        self.place(HOST)

    async def begin_guest(self) -> None:
        """Start the ROSE guest where a node starts it: on its host's cores."""
        cores = self.cores[: self.settings.tensor_parallel]
        self.running[GUEST] = await EngineProcess.start(self._guest(cores))

    async def await_guest(self) -> None:
        """Return once the guest serves."""
        await self.running[GUEST].wait_healthy(START_TIMEOUT_S)
        self.place(GUEST)

    async def kill_guest(self) -> None:
        """Kill the whole guest, and return when nothing of it is left."""
        await self.running.pop(GUEST).process.kill()

    def place(self, name: str) -> None:
        """Pin an engine's core to the serving core, its other processes to the other core, and the
        second of two ranks, too.
        """
        api = psutil.Process(self.running[name].process.pid)
        children = api.children(recursive=True)
        cores = [p for p in children if any(core in " ".join(p.cmdline()) for core in CORES)]
        if not cores:
            raise EngineStartError(f"engine {name} has no engine core process to pin")
        for process in (api, *children):
            serves = process in cores and "TP1" not in " ".join(process.cmdline())
            pin(process.pid, {self.cores[0 if serves else 1]})

    def _host(self, ttft_s: float, tpot_s: float) -> EngineSpec:
        return self._spec(
            *(HOST, EngineRole.HOST, HOST_MODEL, HOST_SEQUENCES, self.settings.host),
            {STEP_LOG: str(self.settings.out.resolve())},
            # A few times what it uses alone; beside a naive guest its queue needs ten times that.
            kv_bytes=64 << 20,
            control_page=self.page,
            ttft_target_s=ttft_s,
            tpot_target_s=tpot_s,
            extra_args=HOST_ARGS[self.settings.host],
        )

    def _guest(self, cores: tuple[int, ...] = ()) -> EngineSpec:
        streams = self.settings.guest_streams
        return self._spec(
            *(GUEST, EngineRole.GUEST, GUEST_MODEL, streams, self.settings.guest),
            {STEP_LOG: str(self.settings.out.resolve()), "ROSE_ORPHAN_S": "5"},
            cores=cores,
            # Two to three times what its streams need: a halved cap is felt, a whole one is not.
            kv_bytes=16 << 20,
            stream_interval=16,
            control_page=self.page,
            verify_key=self.key.verify_key.hex,
            weights_dir=self.store,
        )

    def _naive(self) -> EngineSpec:
        streams = self.settings.guest_streams
        return self._spec(
            *(NAIVE, EngineRole.STOCK, GUEST_MODEL, streams, self.settings.guest),
            {},
            stream_interval=16,
            extra_args=STOCK_ARGS[self.settings.guest],
        )

    def _spec(
        self,
        name: str,
        role: EngineRole,
        model: str,
        sequences: int,
        engine: EngineKind,
        env: dict[str, str],
        **more: Any,  # noqa: ANN401 - fields of a spec
    ) -> EngineSpec:
        return EngineSpec(
            name=name,
            role=role,
            model_dir=self.model_root / model,
            port=self.ports[name],
            log=self.logs / f"engine-{name}.log",
            dtype=MODELS[model].dtype,
            max_model_len=256,
            max_num_seqs=sequences,
            tensor_parallel=self.settings.tensor_parallel,
            **more,
            **self._run_by(engine, env),
        )

    def _run_by(self, engine: EngineKind, env: dict[str, str]) -> dict[str, Any]:
        """Return a spec's engine, its interpreter, and the environment in which it finds ROSE."""
        if engine is EngineKind.VLLM:
            return {"extra_env": env}
        found = module_path(self.settings.out.resolve() / METADATA)
        python = self.settings.sglang_python.absolute()
        return {"engine": engine, "python": python, "extra_env": {**env, "PYTHONPATH": found}}


@dataclass(slots=True)
class CoserveDrills:
    """Drills of the event arms; `events.jsonl` gets their outcome."""

    engines: Engines
    session: aiohttp.ClientSession
    store: Path
    log: JsonlLog
    event_s: float

    def of(self, name: str) -> Drill | None:
        """Return the drill of an arm, None for the arm without an event."""
        drills: dict[str, Drill] = dict(
            zip(EVENTS, (self.apply, self.kill, self.start), strict=True)
        )
        return drills.get(name)

    def publish(self, key: SigningKey, model: Path, seed: int) -> None:
        """Make version 1, which every life of the guest can apply to the model it started from."""
        base = read_model_dir(model)
        rng = np.random.default_rng(seed)
        publisher = VersionPublisher(ChunkStore(self.store), "bench", "rose-bench", key)
        publisher.publish(1, 0, base, {name: _stepped(t, rng) for name, t in base.items()})

    async def apply(self, block: int) -> None:
        """Apply version 1."""
        await asyncio.sleep(WHEN * self.event_s)
        began_s = time.monotonic()
        store, engines = ChunkStore(self.store), self.engines
        client = ReplicaClient(self.session, engines.url(GUEST), lambda: engines.headers(GUEST))
        try:
            applied = await client.apply([store.manifest_path(1)], store.chunks_dir)
        except (RefusedError, UnavailableError) as error:
            self._write("weight_apply", block, began_s, ok=False, message=str(error))
            return
        detail = {"pause_s": applied.pause_s, "apply_s": applied.apply_s}
        detail |= {"changed": applied.changed_elements, "wire_bytes": applied.wire_bytes}
        self._write("weight_apply", block, began_s, ok=applied.ok, **detail)

    async def kill(self, block: int) -> None:
        """Kill the guest."""
        await asyncio.sleep(WHEN * self.event_s)
        began_s = time.monotonic()
        await self.engines.kill_guest()
        self._write("guest_kill", block, began_s, ok=True)

    async def start(self, block: int) -> None:
        """Start the guest; the window covers as much of the start as fits."""
        began_s = time.monotonic()
        await self.engines.begin_guest()
        await self.engines.await_guest()
        self._write("guest_start", block, began_s, ok=True, window_s=self.event_s)

    def _write(self, event: str, block: int, began_s: float, *, ok: bool, **detail: object) -> None:
        took_s = time.monotonic() - began_s
        told = {"t_s": began_s, "source": "bench", "event": event, "block": block}
        self.log.write({**told, "took_s": took_s, "ok": ok, "detail": detail})


def _stepped(tensor: TensorBits, rng: np.random.Generator) -> TensorBits:
    moved = rng.random(tensor.bits.size) < CHANGED_SHARE
    bits = np.where(moved, tensor.bits ^ tensor.bits.dtype.type(1), tensor.bits)
    return TensorBits(tensor.name, tensor.dtype, tensor.shape, bits.astype(tensor.bits.dtype))
