"""verl on CPUs, for measurements and tests: a platform, and what its FSDP engine takes for granted.

Each of verl's processes imports it, by VERL_USE_EXTERNAL_MODULES, with VERL_PLATFORM=cpu and
VERL_ENGINE_DEVICE=cuda: the engine is registered for GPUs alone, and runs on CPU tensors as it is.
"""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

BOTH = "cpu:gloo,cpu:gloo"


def _nothing(*_: object, **__: object) -> None:
    return None


def _zero(*_: object, **__: object) -> int:
    return 0


def _device() -> types.ModuleType:
    """Return `torch.cpu` with the names that `torch.cuda` has besides."""
    module = types.ModuleType("torch_cpu_as_a_device")
    for name in dir(torch.cpu):
        if not name.startswith("__"):
            setattr(module, name, getattr(torch.cpu, name))
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        setattr(module, name, _zero)
    for name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "manual_seed"):
        setattr(module, name, _nothing)
    more: dict[str, Any] = {
        "max_memory_reserved": _zero,
        "set_per_process_memory_fraction": _nothing,
        "manual_seed_all": _nothing,
        "set_rng_state": _nothing,
        "mem_get_info": lambda *_: (1 << 30, 1 << 30),
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: "cpu",
        "get_device_name": lambda *_: "cpu",
        "memory": types.SimpleNamespace(_set_allocator_settings=_nothing),
    }
    for name, value in more.items():
        setattr(module, name, value)
    return module


_MODULE = _device()


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):  # type: ignore[misc]  # verl's types are not read
    """Platform whose device is the CPU."""

    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: _MODULE)
    set_device = synchronize = set_allocator_settings = _nothing
    empty_cache = profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"  # a mere number, which the test gives to Ray

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False


_init = dist.init_process_group


def _init_once(backend: str | None = None, *given: object, **named: object) -> object:
    """Its engine asks for a backend of the CPU and one of the device, which are the same here."""
    return _init("gloo" if backend == BOTH else backend, *given, **named)  # type: ignore[arg-type]


dist.init_process_group = _init_once  # type: ignore[assignment]
