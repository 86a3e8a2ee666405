"""Host, ROSE guest and stock guest on one device; nothing is pinned, for a card is what they share.

All three are started together and stay: a guest of another arm has no requests, so it takes memory
and no time. The stock guest's memory is a share of its own, which is what naive co-location has.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from bench.common.engines import EngineSet
from bench.coserve.plan import GUEST, HOST, NAIVE
from bench.gpu.models import shape_of, write_model
from bench.gpu.sizes import ServingSizes
from executor.step_log import STEP_LOG
from rose.addresses import free_ports
from rose.engines import Device, EngineRole, EngineSpec, module_path
from weight_transfer import SigningKey

NAMES = (HOST, GUEST, NAIVE)
# Two guests and a host take so long together that a daemon's usual patience would end a guest.
ORPHAN_S = 10.0
WARM_UP_S = 60.0
STREAM_INTERVAL = 16


def _free_ports() -> dict[str, int]:
    return dict(zip(NAMES, free_ports(len(NAMES)), strict=True))


@dataclass(slots=True, kw_only=True)
class ServingEngines(EngineSet):
    """`start` fills `running`, `stop` ends all."""

    sizes: ServingSizes
    device: Device
    page: Path
    folder: Path
    key: SigningKey
    guest_weights: Path | None = None
    """Version 0 of the guest, a safetensors file; None where its engine makes weights up."""
    weights_written_s: float = 0.0
    ports: Mapping[str, int] = field(default_factory=_free_ports)

    def __post_init__(self) -> None:
        for name in (self.sizes.host, self.sizes.guest):
            write_model(shape_of(name), self.model_dir(name))
        if self.guest_weights is not None:
            link = self.model_dir(self.sizes.guest) / "model.safetensors"
            link.symlink_to(self.guest_weights.resolve())

    def model_dir(self, model: str) -> Path:
        """Configuration and tokenizer of a model; its weights are made by the engine."""
        return self.folder / "models" / model

    async def start(self, timeout_s: float) -> None:
        """Start all three at once. Raises EngineStartError for the first that does not come up."""
        specs = (self._host(), self._guest(), self._naive())
        await self.start_together(specs, timeout_s, self.folder)

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
        """Return the common part of the three specs."""
        modules = [module_path(self.folder / "plugins"), os.environ.get("PYTHONPATH", "")]
        extra = ["--generation-config=vllm"]
        if self.device is Device.CUDA:
            # vLLM wants this share of the card free at its start, whatever its KV cache takes.
            extra.append("--gpu-memory-utilization=0.1")
        return EngineSpec(
            name=name,
            role=role,
            model_dir=self.model_dir(model),
            port=self.ports[name],
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
