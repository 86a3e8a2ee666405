"""A lending host over a stand-in GPU, under vLLM's own scheduler, and guests on the same GPU."""

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv_cases import (
    BLOCK_TOKENS,
    WIDE,
    HostRig,
    StandInRunner,
    kv_config,
    kv_views,
    make_scheduler,
    next_token,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.kv_cache_interface import KVCacheConfig

from executor import ControlPage
from executor.cuda.backing import Reservation
from executor.cuda.driver import Handle
from executor.cuda.kv_memory import reserve_kv
from executor.cuda.page_pool import PageClient, PagePool
from executor.engine_settings import EngineSettings
from executor.errors import DeviceMemoryShort
from executor.kv.lending import lent_bytes
from executor.vllm.host.scheduler import ObservedScheduler
from tests.fakes.cuda.driver import PAGE, Physical, StandInDevice, StandInDriver

BLOCKS, GRANULE_BLOCKS = 64, 2
"""32 granules, each a page."""
STEP_NS = 10_000_000
_CELL = struct.Struct("<i")


class DeviceRunner(StandInRunner):
    """The stand-in model, its KV in memory of a stand-in GPU."""

    def __init__(self, driver: StandInDriver, caches: dict[str, Any]) -> None:
        super().__init__({name: torch.zeros(1, BLOCK_TOKENS) for name in caches})  # Not used.
        self._driver = driver
        ends = list(caches.values())
        self._ends = [(cache.data_ptr(), cache.stride()[0]) for cache in (ends[0], ends[-1])]

    def _step(self, request_id: str, computed: int, count: int) -> list[int]:
        """Whole blocks at once: the stand-in's bytes are slow."""
        tokens = self._tokens[request_id]
        end = computed + count
        for position in range(computed, end):
            for at in self._places(request_id, position):
                self._driver.write(at, _CELL.pack(tokens[position]))
        if end < len(tokens):
            return []
        read = self._read(request_id, end, 0)
        assert read == self._read(request_id, end, 1), "both layers hold the same tokens"
        tokens.append(next_token(read))
        return [tokens[-1]]

    def _read(self, request_id: str, end: int, layer: int) -> list[int]:
        starts = range(0, end, BLOCK_TOKENS)
        places = [self._places(request_id, position)[layer] for position in starts]
        raw = b"".join(self._driver.read(at, BLOCK_TOKENS * _CELL.size) for at in places)
        return [value for (value,) in _CELL.iter_unpack(raw)][:end]

    def _places(self, request_id: str, position: int) -> list[int]:
        block = self._blocks[request_id][position // BLOCK_TOKENS]
        return [at + position % BLOCK_TOKENS * _CELL.size for at in self.block(block)]

    def block(self, number: int) -> list[int]:
        """Return the place of a block in the first and the last layer."""
        return [base + number * stride for base, stride in self._ends]


class GpuHostRig(HostRig):
    """A host on a GPU; its clock moves by STEP_NS a turn."""

    runner: DeviceRunner
    driver: StandInDriver
    reservation: Reservation
    now_ns = 10**12
    leaks = False
    """True if pages of unknown state may stay behind."""

    def turn(self) -> None:
        self.now_ns += STEP_NS
        super().turn()

    def settle(self, turns: int = 200) -> None:
        for _ in range(turns):
            self.turn()

    def own_memory(self) -> list[Physical]:
        """Return the memory mapped under the KV cache, without the alias page."""
        mapping = self.reservation.mapping
        alias = self.driver.handles[mapping.alias]
        found = [self.driver.mapped[mapping.address(page)].memory for page in range(mapping.pages)]
        return [memory for memory in found if memory is not alias]

    def check(self) -> None:
        """Check the invariants between any two calls."""
        lender, mapping = self.lender, self.reservation.mapping
        held = lender.pool.held if lender is not None else set()
        bare = {page for page in range(mapping.pages) if mapping.behind(page) == mapping.alias}
        for granule in range(BLOCKS // GRANULE_BLOCKS):
            assert granule in held or granule not in bare, f"granule {granule} has no page"
        for at, mapped in self.driver.mapped.items():
            assert mapped.usable, f"{at:#x} would fault"
        blocks = self.blocks.blocks
        free = {block.block_id for block in self.blocks.free_block_queue.get_all_free_blocks()}
        used = {b.block_id for b in blocks if b.ref_cnt > 0 and not b.is_null}
        assert len(free) == self.blocks.get_num_free_blocks()
        assert not {block // GRANULE_BLOCKS for block in free | used} & held
        cached = {b.block_id for b in blocks if b.block_hash is not None}
        assert not {block // GRANULE_BLOCKS for block in cached} & held, "a prefix without memory"
        if lender is not None:
            assert lender.pool.granules.count - len(held) >= lender.reserve
        assert len(set(map(id, self.own_memory()))) == len(self.own_memory())

    def places(self, block: int) -> list[int]:
        """Return the place of a block in each layer."""
        return self.runner.block(block)


def on_a_device(view: torch.Tensor, address: int, size: int, kind: str = "cuda") -> Any:
    """Stand-in for a view of an allocation of `size` bytes at an address of a device."""
    storage = SimpleNamespace(nbytes=lambda: size, data_ptr=lambda: address)
    return SimpleNamespace(
        device=torch.device(kind),
        shape=view.shape,
        stride=view.stride,
        element_size=view.element_size,
        numel=view.numel,
        data_ptr=lambda: address + view.storage_offset() * view.element_size(),
        untyped_storage=lambda: storage,
    )


def device_caches(config: KVCacheConfig, address: int, kind: str = "cuda") -> dict[str, Any]:
    """By layer, what a KV tensor at an address of a device tells of itself."""
    size = config.kv_cache_tensors[0].size
    views = kv_views(config, lambda size: torch.empty(size, dtype=torch.int8, device="meta"))
    return {name: on_a_device(view, address, size, kind) for name, view in views.items()}


@contextlib.contextmanager
def gpu_host(
    folder: Path,
    device: StandInDevice,
    *,
    by_handle: bool,
    depth: int = 1,
    caching: bool = True,
) -> Iterator[GpuHostRig]:
    with pytest.MonkeyPatch.context() as patch:
        page = ControlPage.ensure(folder / "page")
        environ = {
            "ROSE_ROLE": "host",
            "ROSE_CONTROL_PAGE": str(page.path),
            "ROSE_HOST_LEVEL": "lend",
            "ROSE_PAGE_SOCKET": str(folder / "pages") if by_handle else "",
        }
        for name, value in environ.items():
            patch.setitem(os.environ, name, value)
        driver = StandInDriver(device)
        kv = kv_config(BLOCKS, WIDE, on_gpu=True)
        settings = EngineSettings.from_environ(os.environ)
        reservation = reserve_kv(settings, driver, kv.kv_cache_tensors[0].size)
        caches = device_caches(kv, reservation.address)
        scheduler = make_scheduler(ObservedScheduler, folder, kv, caches, depth, caching=caching)
        rig = GpuHostRig(scheduler, DeviceRunner(driver, caches), page, [], depth)
        rig.driver, rig.reservation = driver, reservation
        rig.hasher = get_request_block_hasher(BLOCK_TOKENS, sha256) if caching else None
        scheduler.lender.clock_ns = lambda: rig.now_ns
        yield rig
        reservation.close()
        assert driver.is_clean or rig.leaks
        page.close()


class DriverGuest:
    """A guest that creates what the host released, as far as the host's section allows it."""

    def __init__(self, device: StandInDevice, host: GpuHostRig) -> None:
        self.driver = StandInDriver(device)
        self._host = host
        self._pool = PagePool(self.driver, PAGE)
        self.pages: list[Handle] = []

    def grow(self, most: int = 1000) -> None:
        free = self._allowed() - len(self.pages)
        for _ in range(min(free, most)):
            try:
                self.pages += self._pool.take(1)
            except DeviceMemoryShort:
                return

    def obey(self) -> None:
        """Obey the host's section like node and balloon."""
        over = max(0, len(self.pages) - self._allowed())
        self._pool.give([self.pages.pop() for _ in range(over)])

    def give_all(self) -> None:
        self._pool.give(self.pages)
        self.pages.clear()

    def die(self) -> None:
        self.driver.die()
        self.pages.clear()

    def memory(self) -> list[Physical]:
        return [self.driver.handles[handle] for handle in self.pages]

    def _allowed(self) -> int:
        return lent_bytes(self._host.published) // PAGE


class HandleGuest(DriverGuest):
    """A guest that borrows pages."""

    def __init__(self, device: StandInDevice, host: GpuHostRig) -> None:
        super().__init__(device, host)
        path = host.page.path.parent / "pages"
        self.borrower = PageClient(self.driver, PAGE, path, PagePool(self.driver, PAGE))

    def grow(self, most: int = 1000) -> None:
        self.borrower.step()
        self.pages += self.borrower.take(min(most, self.borrower.unmapped))

    def obey(self) -> None:
        self.borrower.step()
        wanted = min(len(self.pages), self.borrower.wanted)
        self.borrower.give([self.pages.pop() for _ in range(wanted)])

    def give_all(self) -> None:
        self.borrower.step()
        self.borrower.give(self.pages)
        self.pages.clear()

    def die(self) -> None:
        """Die; the lender learns it by `has_ended`."""
        self.borrower.close()
        super().die()
