"""KV buffers of SGLang on a GPU in memory that ROSE reserved, of which pages can be given back.

SGLang allocates the keys and values of each layer with `torch.zeros`, of which no page can be given
back. With ROSE_KV_BACKEND=cuda the hook around a pool's `_create_buffers` runs it twice: first on
torch's meta device, which shows the sizes, then over one reservation:

    | layer 0: keys … | values … | layer 1: keys … | values … | …

Each part begins on a page, also the values in an allocation of both halves, if a page is a whole
number of blocks: kernels reach values by counting blocks from the keys. So a granule is the blocks
of one page in each part: 1024 tokens, 128 MiB, for an 8B model in bf16.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from executor.cuda.backing import as_tensor, whole
from executor.cuda.driver import Driver, open_driver
from executor.cuda.kv_memory import reserve_kv
from executor.engine_settings import CUDA, HOST, EngineSettings
from executor.errors import ExecutorError
from executor.sglang import surfaces
from executor.sglang.compat import Hook, check_version

_MODULE: Final = "sglang.srt.mem_cache.memory_pool"
# Subclasses have buffers of other kinds, or none.
POOLS: Final = ("MHATokenToKVPool", "MLATokenToKVPool")

logger = logging.getLogger("rose.kv")


class _Parts(TorchFunctionMode):
    """Context in which torch.zeros on a kind of device returns parts of `memory`, in a row.

    Each begins on a page. Without memory the parts are on the meta device. `end`: bytes so far.
    """

    def __init__(
        self, device_type: str, page_bytes: int, page_slots: int, memory: torch.Tensor | None = None
    ) -> None:
        """Begin with nothing taken; page_slots: tokens of a block, by which kernels count."""
        super().__init__()
        self._device_type = device_type
        self._page_bytes = page_bytes
        self._page_slots = page_slots
        self._memory = memory
        self.end = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Return a part for torch.zeros on the device, else torch's own result."""
        kwargs = kwargs or {}
        if func is torch.zeros and torch.device(kwargs.get("device") or "cpu").type == (
            self._device_type
        ):
            return self._part(tuple(args[0]), kwargs["dtype"])
        return func(*args, **kwargs)

    def _part(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        placed = self._apart(shape, dtype)
        start, size = self.end, math.prod(placed) * dtype.itemsize
        self.end = start + -(-size // self._page_bytes) * self._page_bytes
        if self._memory is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        part = self._memory[start : start + size].view(dtype).view(placed)
        return part if placed == shape else part[:, : shape[1]]

    def _apart(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
        """Return the shape of an allocation, with a gap before its values if it has both halves."""
        if len(shape) <= 3 or shape[0] != 2:
            return shape
        row_bytes = math.prod(shape[2:]) * dtype.itemsize
        # A row is a token, or in SGLang's layout of heads before tokens a block.
        block_bytes = row_bytes * (self._page_slots if len(shape) == 4 else 1)
        if self._page_bytes % block_bytes:
            return shape
        rows = self._page_bytes // row_bytes
        return (2, -(-shape[1] // rows) * rows, *shape[2:])


def _known(size: int) -> int:
    """Return `size`. Raises ExecutorError for 0: then SGLang allocates its KV cache later."""
    if not size:
        raise ExecutorError(
            "SGLang sizes its KV cache later; unset SGLANG_ENABLE_POST_CAPTURE_KV_SIZING, or"
            " ROSE_KV_BACKEND"
        )
    return size


class ReservedBuffers:
    """Hook around `_create_buffers` of SGLang's KV pools: their buffers lie in a reservation.

    A host whose memory ROSE cannot reserve gets SGLang's own, with a warning. A guest must not
    start without memory that it can return, so the error is raised.
    """

    device_type = "cuda"

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings

    @property
    def hooks(self) -> Mapping[str, Hook]:
        """Hooks by the full names of the functions that they are set around; {} if none is."""
        if not self._settings.moves_pages or self._settings.kv_backend != CUDA:
            return {}
        return dict.fromkeys((f"{_MODULE}.{pool}._create_buffers" for pool in POOLS), self)

    def __call__(self, original: Hook, pool: Any, *a: Any, **named: Any) -> Any:  # noqa: ANN401
        """Create a pool's buffers as SGLang does, in reserved memory. Raises ExecutorError."""
        if type(pool).__name__ not in POOLS or torch.device(pool.device).type != self.device_type:
            return original(pool, *a, **named)
        try:
            check_version(surfaces.RESERVED)
            driver = self.open_driver()
            parts = self.device_type, driver.granularity, int(pool.page_size)
            with _Parts(*parts) as sizes:
                original(pool, *a, **named)
            memory = self.memory(driver, _known(sizes.end))
        except Exception as error:
            if self._settings.role != HOST:
                raise
            logger.warning("KV memory is not reserved, the host serves without lending: %s", error)
            return original(pool, *a, **named)
        with _Parts(*parts, memory):
            return original(pool, *a, **named)

    def open_driver(self) -> Driver:
        """Return the driver of this rank's GPU. Raises DeviceError."""
        return open_driver(torch.cuda.current_device())

    def memory(self, driver: Driver, size: int) -> torch.Tensor:
        """Return `size` reserved bytes of the GPU. Raises DeviceError or LoanError."""
        from sglang.srt.runtime_context import get_parallel

        # The rest of the profile run in torch's cache is memory that the driver lacks.
        torch.cuda.empty_cache()
        ranks = int(get_parallel().tp_size or 1)
        reservation = reserve_kv(self._settings, driver, size, ranks)
        return as_tensor(whole(reservation), torch.device("cuda", torch.cuda.current_device()))
