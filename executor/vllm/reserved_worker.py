"""`--worker-cls executor.vllm.reserved_worker.ReservedKvWorker`: GPU KV memory that can be
returned.

Stock vLLM allocates its KV cache with `torch.zeros`, of which no page can be given back. This
worker asks for one allocation in which a block's layers are neighbours, and puts a reservation in
its place; everything else is the stock worker's.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.v1.worker.gpu_worker import Worker

from executor.cuda.backing import as_tensor, whole
from executor.cuda.driver import open_driver
from executor.cuda.kv_memory import reserve_kv
from executor.engine_settings import EngineSettings
from executor.errors import ExecutorError
from executor.vllm.compat import check_version
from executor.vllm.kv_backing import block_outermost_first, check_views, packed
from executor.vllm.rank_worker import GatedStart, RankedWorker, host_goes_on
from executor.vllm.surfaces import WORKER


class ReservedZeros(TorchFunctionMode):
    """Context in which torch.zeros returns `reserve()` for the KV cache's allocation.

    That is the one of `size` int8 elements on `device_type`; `handed_out` counts such calls.
    """

    def __init__(self, size: int, device_type: str, reserve: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self._size = size
        self._device_type = device_type
        self._reserve = reserve
        self.handed_out = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Return `reserve()` for the KV cache's allocation, else torch's own result."""
        kwargs = kwargs or {}
        if func is torch.zeros and self._is_the_cache(args, kwargs):
            self.handed_out += 1
            return self._reserve()
        return func(*args, **kwargs)

    def _is_the_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        device = torch.device(kwargs.get("device") or "cpu")
        wanted = (self._size,), torch.int8, self._device_type
        return (args, kwargs.get("dtype"), device.type) == wanted


class ReservedKvWorker(RankedWorker, GatedStart, Worker):  # type: ignore[misc] # vLLM's types are not ours
    """GPU worker of vLLM whose KV cache lies in memory that ROSE reserved and can give back.

    A guest's start passes the gate.
    """

    device: torch.device
    vllm_config: Any

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Return the stock worker's layouts, those with small granules first (vLLM 0.32)."""
        layouts: list[str] = super().get_supported_kv_cache_layouts()
        try:
            return block_outermost_first(layouts)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the host starts
            host_goes_on(error)
            return layouts

    def initialize_from_config(self, kv_cache_config: Any) -> None:  # noqa: ANN401 -- vLLM's type
        """Allocate the KV cache as vLLM does, in reserved memory.

        A host whose memory ROSE cannot reserve gets vLLM's own, with a warning. A guest must not
        start without memory that it can return: raises ExecutorError.
        """
        try:
            check_version(WORKER)
            config = packed(kv_cache_config)
            size = max((tensor.size for tensor in config.kv_cache_tensors), default=0)
            memory = self._reserved(size)
        except Exception as error:  # noqa: BLE001 -- whatever it is, the host starts
            host_goes_on(error)
            super().initialize_from_config(kv_cache_config)
            return
        with ReservedZeros(size, self.device.type, lambda: memory) as zeros:
            super().initialize_from_config(config)
        if zeros.handed_out != 1:
            raise ExecutorError(
                f"vLLM made {zeros.handed_out} allocations of {size} bytes for its KV cache; start"
                " without ReservedKvWorker, or with the vLLM that ROSE is tested with"
            )
        if config is not kv_cache_config:
            (group,) = config.kv_cache_groups
            layers = self.vllm_config.compilation_config.static_forward_context
            check_views(layers[name].kv_cache for name in group.layer_names)

    def _reserved(self, size: int) -> torch.Tensor:
        if self.device.type != "cuda":
            raise ExecutorError(f"ReservedKvWorker is for GPUs, and this is {self.device}")
        # The rest of the profile run in torch's cache is memory that the driver lacks.
        torch.cuda.empty_cache()
        settings = EngineSettings.from_environ(os.environ)
        driver, ranks = (
            open_driver(self.device.index or 0),
            self.vllm_config.parallel_config.world_size,
        )
        reservation = reserve_kv(settings, driver, size, ranks)
        return as_tensor(whole(reservation), self.device)
