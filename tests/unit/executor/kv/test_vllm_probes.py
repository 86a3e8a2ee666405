"""An engine whose pool or addresses behave otherwise than ROSE expects is refused, by name."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kv_cases import HostRig, host_of
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

from executor.control_page.host_description import HostDescription
from executor.errors import EngineProbeError
from executor.kv.backing import Extent, NoPages, PageBackend
from executor.kv.shrink_plan import Granules
from executor.vllm import probes
from executor.vllm.kv_backing import KvLayout
from executor.vllm.kv_block_pool import BalloonedPool, GranuleQueue
from executor.vllm.probes import check_addresses

__all__ = ["host_of"]
BLOCKS, A_BLOCK, LAYERS = 12, 64, 3


def pool() -> Any:
    return BlockPool(BLOCKS, enable_caching=True, hash_block_size=16)


def balloon(pool: Any) -> BalloonedPool:
    return BalloonedPool(pool, Granules(BLOCKS, 4), NoPages(1))


def test_a_probed_pool_is_as_it_was() -> None:
    probed, fresh = pool(), pool()
    before = {block.block_id for block in fresh.free_block_queue.get_all_free_blocks()}
    made = balloon(probed)
    queue = probed.free_block_queue
    assert isinstance(queue, GranuleQueue)
    assert {block.block_id for block in queue.get_all_free_blocks()} == before
    assert queue.num_plain_blocks == queue.num_free_blocks == BLOCKS - 1
    assert [block.ref_cnt for block in probed.blocks] == [block.ref_cnt for block in fresh.blocks]
    assert made.capacity_blocks == BLOCKS - 1


def miscounts(queue: Any, n: int) -> Any:
    taken = FreeKVCacheBlockQueue.popleft_n(queue, n)
    queue.num_free_blocks += 1
    return taken


TAKE = GranuleQueue.popleft_n


def gives_one_twice(queue: Any, n: int) -> Any:
    first, *_ = taken = TAKE(queue, n)
    queue.prepend_n(taken[1:])
    return [first] * n


@pytest.mark.parametrize(
    ("of", "does", "differs"),
    [
        (FreeKVCacheBlockQueue, {"popleft_n": miscounts}, "counts of free blocks"),
        (GranuleQueue, {"popleft_n": gives_one_twice}, "cannot use"),
        (GranuleQueue, {"append_n": lambda *_: None}, "blocks|free queue"),
        (GranuleQueue, {"get_all_free_blocks": lambda _: []}, "free blocks"),
        (FreeKVCacheBlockQueue, {"remove": None}, "cannot use"),
    ],
)
def test_a_pool_that_behaves_otherwise_keeps_its_own_queue(
    monkeypatch: pytest.MonkeyPatch, of: type, does: dict[str, Any], differs: str
) -> None:
    probed = pool()
    if of is FreeKVCacheBlockQueue:
        altered = type("OtherQueue", (of,), {})
        probed.free_block_queue.__class__ = altered
        of = altered
    granules = GranuleQueue(Granules(BLOCKS, 4), probed.free_block_queue.get_all_free_blocks())
    for name, instead in does.items():
        monkeypatch.setattr(of, name, instead)
    with pytest.raises(EngineProbeError, match=differs):
        probes.replace_queue(probed, granules)
    monkeypatch.undo()
    assert isinstance(probed.free_block_queue, FreeKVCacheBlockQueue)
    assert probed.get_num_free_blocks() == BLOCKS - 1
    assert len(probed.get_new_blocks(BLOCKS - 1)) == BLOCKS - 1, "none was lost"


def layered(outermost: bool) -> tuple[list[torch.Tensor], list[Extent]]:
    """Return the tensors of LAYERS layers in one allocation, and the extents of their blocks.

    outermost: the order is block after block, else layer after layer.
    """
    memory = torch.zeros(LAYERS * BLOCKS * A_BLOCK, dtype=torch.float16)
    each = memory.view(BLOCKS, LAYERS, A_BLOCK) if outermost else memory.view(LAYERS, BLOCKS, -1)
    tensors = [each[:, n] if outermost else each[n] for n in range(LAYERS)]
    stride = tensors[0].stride(0) * 2
    return tensors, [Extent(tensor.data_ptr(), stride, 2 * A_BLOCK) for tensor in tensors]


class Released(PageBackend):
    bytes_returned = 0
    released: tuple[int, ...] = ()

    def release(self, granules: object) -> None: ...

    def restore(self, granules: object) -> None: ...


def checked(
    monkeypatch: pytest.MonkeyPatch,
    tensors: list[Any],
    extents: list[Extent],
    pages: PageBackend,
    blocks: int = BLOCKS,
) -> None:
    layers = {f"layer{n}": SimpleNamespace(kv_cache=tensor) for n, tensor in enumerate(tensors)}
    vllm = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    group = SimpleNamespace(layer_names=list(layers))
    config = SimpleNamespace(num_blocks=blocks, kv_cache_groups=[group])
    monkeypatch.setattr(probes, "kv_layout", lambda *_: KvLayout((), tuple(extents)))
    check_addresses(vllm, config, pages)


@pytest.mark.parametrize("outermost", [True, False])
def test_right_addresses_pass(monkeypatch: pytest.MonkeyPatch, outermost: bool) -> None:
    tensors, extents = layered(outermost)
    checked(monkeypatch, [*tensors, tensors[0]], extents, Released())  # Two layers share one.
    checked(monkeypatch, [(tensors[0],), *tensors[1:]], extents, Released())
    heads = [tensor.view(BLOCKS, 4, -1).permute(0, 2, 1) for tensor in tensors]
    checked(monkeypatch, heads, extents, Released())
    kernel = [tensor.view(BLOCKS * 2, -1) for tensor in tensors if tensor.is_contiguous()]
    if kernel:
        checked(monkeypatch, kernel, extents, Released())


def shifted(extent: Extent, by: int) -> Extent:
    return Extent(extent.base + by, extent.stride, extent.block_bytes)


@pytest.mark.parametrize("outermost", [True, False])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda extents: [shifted(extents[0], 2), *extents[1:]],
        lambda extents: [shifted(extents[0], extents[0].stride), *extents[1:]],
        lambda extents: [Extent(e.base, e.stride, e.block_bytes // 2) for e in extents],
        lambda extents: [Extent(e.base, e.stride, e.stride + 2) for e in extents],
        lambda extents: [Extent(e.base, e.stride // 2, e.block_bytes) for e in extents],
        lambda extents: extents[:-1],
        lambda extents: [shifted(e, 1 << 40) for e in extents],
    ],
    ids=["shifted", "next block", "short", "long", "stride", "a layer short", "elsewhere"],
)
def test_wrong_addresses_are_refused(
    monkeypatch: pytest.MonkeyPatch,
    outermost: bool,
    wrong: Callable[[list[Extent]], list[Extent]],
) -> None:
    tensors, extents = layered(outermost)
    with pytest.raises(EngineProbeError, match=r"block 1 of layer\d is not at the address"):
        checked(monkeypatch, tensors, wrong(extents), Released())


def test_blocks_that_are_not_first_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, extents = layered(outermost=False)
    with pytest.raises(EngineProbeError):
        checked(monkeypatch, [tensor.T for tensor in tensors], extents, Released(), blocks=7)


def test_memory_that_is_not_given_back_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, extents = layered(outermost=False)
    checked(monkeypatch, tensors, [shifted(extent, 2) for extent in extents], NoPages(1))


def test_a_host_whose_probe_fails_serves_on_without_lending(
    host_of: Callable[..., HostRig],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: object) -> None:
        raise EngineProbeError("block 1 of layer0 is not at the address that ROSE computes")

    monkeypatch.setattr("executor.vllm.host.kv_lender.check_addresses", fails)
    rig = host_of(level="lend")
    assert caplog.text.count("KV memory is not lent") == 1
    rig.add("a", [1, 2, 3], 4)
    rig.run_until_idle()
    assert len(rig.outputs["a"]) == 4
    seat = rig.page.seat.read()
    assert seat is not None
    said = HostDescription.current(rig.page.path, seat.taken_ns)
    assert said is not None
    assert "block 1 of layer0" in said.lacks[0]
    rig.scheduler.shutdown()
