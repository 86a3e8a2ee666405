"""The real driver, where there is one: NVML_DEVICE. Elsewhere it is skipped with a word."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from rose.nvml import CardError, Nvml, card_of

SIZE = 512 << 20


@pytest.fixture(scope="module")
def nvml() -> Nvml:
    try:
        return Nvml()
    except CardError as error:
        pytest.skip(f"no GPU here: {error}")


@pytest.fixture
def cuda() -> Iterator[Any]:
    """CUDA's driver with a context on the first card that it shows to this process."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="without cuda-bindings")
    ok = driver.CUresult.CUDA_SUCCESS
    assert driver.cuInit(0)[0] == ok
    code, device = driver.cuDeviceGet(0)
    assert code == ok
    code, _ = driver.cuDevicePrimaryCtxRetain(device)
    assert code == ok
    yield driver
    driver.cuDevicePrimaryCtxRelease(device)


def card_here(nvml: Nvml, driver: Any) -> Any:
    code, uuid = driver.cuDeviceGetUuid(driver.cuDeviceGet(0)[1])
    assert code == driver.CUresult.CUDA_SUCCESS
    raw = bytes(uuid.bytes).hex()
    parts = raw[:8], raw[8:12], raw[12:16], raw[16:20], raw[20:]
    return card_of(nvml.cards(), f"GPU-{'-'.join(parts)}")


def mine(nvml: Nvml, card: Any) -> int | None:
    told = {client.pid: client.memory_bytes for client in nvml.clients(card)}
    return told.get(os.getpid())


def test_memory_that_a_process_takes_is_seen_and_never_as_nothing(nvml: Nvml, cuda: Any) -> None:
    """By process where the driver tells; in free memory always."""
    card = card_here(nvml, cuda)
    code, context = cuda.cuDevicePrimaryCtxRetain(cuda.cuDeviceGet(0)[1])
    assert code == cuda.CUresult.CUDA_SUCCESS
    cuda.cuCtxPushCurrent(context)
    free, held = nvml.free_bytes(card), mine(nvml, card)
    code, address = cuda.cuMemAlloc(SIZE)
    assert code == cuda.CUresult.CUDA_SUCCESS
    try:
        assert free - nvml.free_bytes(card) >= SIZE
        now = mine(nvml, card)
        assert now != 0
        assert held is None or (now is not None and now - held >= SIZE)
    finally:
        cuda.cuMemFree(address)
    assert abs(nvml.free_bytes(card) - free) < SIZE
