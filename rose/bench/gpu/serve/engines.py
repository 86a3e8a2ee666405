"""Host, ROSE guest and stock guest on one device; nothing is pinned, for a card is what they share.

All three are started together and stay: a guest of another arm has no requests, so it takes memory
and no time. The stock guest's memory is a share of its own, which is what naive co-location has.
"""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from executor.step_log import STEP_LOG
from rose.addresses import free_ports
from rose.bench.coserve.names import GUEST, HOST, NAIVE
from rose.bench.gpu.models import shape_of
from rose.bench.gpu.serve.model_dir import write_model
from rose.bench.gpu.serve.sizes import ServingSizes
from rose.engines import Device, EngineProcess, EngineRole, EngineSpec, module_path
from rose.errors import EngineStartError
from weight_transfer import SigningKey

NAMES = (HOST, GUEST, NAIVE)
# Two guests and a host take so long together that a daemon's usual patience would end a guest.
ORPHAN_S = 10.0
WARM_UP_S = 60.0
STREAM_INTERVAL = 16


@dataclass(slots=True)
class ServingEngines:
    """`start` fills `running`, `stop` ends all."""

    sizes: ServingSizes
    device: Device
    page: Path
    folder: Path
    key: SigningKey
    guest_weights: Path | None = None
    """The guest's version 0, a safetensors file; None where its engine makes weights up."""
    weights_written_s: float = 0.0
    running: dict[str, EngineProcess] = field(default_factory=dict)
    _ports: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ports = dict(zip(NAMES, free_ports(len(NAMES)), strict=True))
        for name in (self.sizes.host, self.sizes.guest):
            write_model(shape_of(name), self.model_dir(name))
        if self.guest_weights is not None:
            link = self.model_dir(self.sizes.guest) / "model.safetensors"
            link.symlink_to(self.guest_weights.resolve())

    def model_dir(self, model: str) -> Path:
        """Configuration and tokenizer of a model; its weights are made by the engine."""
        return self.folder / "models" / model

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._ports[name]}"

    def headers(self, name: str) -> dict[str, str]:
        """What it asks for of whoever controls it."""
        return self.running[name].headers

    def pid(self, name: str) -> int | None:
        engine = self.running.get(name)
        return engine.process.pid if engine and engine.process.returncode is None else None

    async def start(self, timeout_s: float) -> None:
        """All three at once. Raises EngineStartError for the first that does not come up."""
        for spec in (self._host(), self._guest(), self._naive()):
            self.running[spec.name] = await EngineProcess.start(spec)
        await await_all(self.running, timeout_s, self.folder)

    def prioritise_guest(self, *, background: bool) -> None:
        """Not here: the kernel's priorities say nothing about a card."""

    def check(self) -> None:
        for name, engine in self.running.items():
            if engine.process.returncode is not None:
                raise EngineStartError(
                    f"engine {name} ended: {engine.last_words()}; see {engine.spec.log}"
                )

    async def stop(self) -> None:
        await asyncio.gather(*(engine.stop() for engine in self.running.values()))
        self.running.clear()

    def _host(self) -> EngineSpec:
        sizes = self.sizes
        spec = self._spec(HOST, EngineRole.HOST, sizes.host, sizes.host_sequences)
        return replace(
            spec,
            kv_bytes=sizes.host_kv_bytes,
            control_page=self.page,
            ttft_target_s=sizes.ttft_target_s,
            tpot_target_s=sizes.tpot_target_s,
            # Arms replay the same prompts: none may find them cached.
            extra_args=(*spec.extra_args, "--no-enable-prefix-caching"),
        )

    def _guest(self) -> EngineSpec:
        sizes = self.sizes
        return replace(
            self._spec(GUEST, EngineRole.GUEST, sizes.guest, sizes.guest_load.streams),
            kv_bytes=sizes.guest_kv_bytes,
            kv_backend=sizes.kv_backend,
            load_format="dummy" if self.guest_weights is None else "auto",
            control_page=self.page,
            orphan_s=ORPHAN_S,
            verify_key=self.key.verify_key.hex,
            weights_dir=self.folder,
            warm_up_s=WARM_UP_S,
            stream_interval=STREAM_INTERVAL,
        )

    def _naive(self) -> EngineSpec:
        sizes = self.sizes
        return replace(
            self._spec(NAIVE, EngineRole.STOCK, sizes.guest, sizes.guest_load.streams),
            kv_bytes=sizes.guest_kv_bytes,
            stream_interval=STREAM_INTERVAL,
        )

    def _spec(self, name: str, role: EngineRole, model: str, sequences: int) -> EngineSpec:
        """What all have in common."""
        modules = [module_path(self.folder / "plugins"), os.environ.get("PYTHONPATH", "")]
        extra = ["--generation-config=vllm"]
        if self.device is Device.CUDA:
            # vLLM wants this share of the card free at its start, whatever its KV cache takes.
            extra.append("--gpu-memory-utilization=0.1")
        return EngineSpec(
            name=name,
            role=role,
            model_dir=self.model_dir(model),
            port=self._ports[name],
            log=self.folder / f"engine-{name}.log",
            dtype=self.sizes.dtype,
            max_model_len=self.sizes.max_model_len,
            max_num_seqs=sequences,
            device=self.device,
            enforce_eager=self.device is Device.CPU,
            load_format="dummy",
            extra_env={
                STEP_LOG: str(self.folder.resolve()),
                "PYTHONPATH": os.pathsep.join(filter(None, modules)),
                # Compiled code, kept for the next session; two engines must not write the same.
                "VLLM_CACHE_ROOT": str((self.folder.parent / "cache" / name).resolve()),
            },
            extra_args=tuple(extra),
        )


async def await_all(engines: Mapping[str, EngineProcess], timeout_s: float, logs: Path) -> None:
    """Return once all serve. Raises EngineStartError as soon as one cannot, or when time is up."""
    waiting = {
        asyncio.create_task(engine.wait_healthy(timeout_s), name=name)
        for name, engine in engines.items()
    }
    done, late = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
    for task in late:
        task.cancel()
    for task in done:
        task.result()
    if late:
        names = ", ".join(sorted(task.get_name() for task in late))
        raise EngineStartError(
            f"not ready after {timeout_s:.0f} s: {names}; see {logs}/engine-*.log"
        )
