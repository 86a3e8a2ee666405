"""One GPU for a test: a stand-in, or the real one where there is one; bodies run on both."""

import ctypes
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from executor.cuda.driver import Driver, open_driver
from executor.errors import DeviceError
from tests.fakes.cuda.driver import PAGE, StandInDevice, StandInDriver

ZEROS = bytes(64)


@dataclass
class Gpu:
    """A driver, and what a kernel would see at an address."""

    driver: Driver
    read: Callable[[int, int], bytes]
    write: Callable[[int, bytes], None]
    page_bytes: int

    def pattern(self, seed: int) -> bytes:
        return random.Random(seed).randbytes(len(ZEROS))


@pytest.fixture
def driver() -> Iterator[StandInDriver]:
    """A stand-in alone, of 64 pages."""
    made = StandInDriver(StandInDevice(total_bytes=64 * PAGE))
    yield made
    assert made.is_clean, "something stayed reserved, mapped or held"


@pytest.fixture(params=["stand-in", "device"])
def gpu(request: pytest.FixtureRequest) -> Iterator[Gpu]:
    if request.param == "device":
        yield device_gpu()
        return
    driver = StandInDriver(StandInDevice(total_bytes=64 * PAGE))
    yield Gpu(driver, driver.read, driver.write, PAGE)
    assert driver.is_clean, "something stayed reserved, mapped or held"


def device_gpu() -> Gpu:
    cuda: Any = pytest.importorskip("cuda.bindings.driver", reason="without cuda-bindings")
    try:
        driver = open_driver()
    except DeviceError as error:
        pytest.skip(f"no GPU here: {error}")

    def check(code: Any, *_: Any) -> None:
        assert code == cuda.CUresult.CUDA_SUCCESS

    def read(address: int, size: int) -> bytes:
        found = ctypes.create_string_buffer(size)
        check(*cuda.cuMemcpyDtoH(ctypes.addressof(found), address, size))
        return found.raw

    def write(address: int, data: bytes) -> None:
        source = ctypes.create_string_buffer(data, len(data))
        check(*cuda.cuMemcpyHtoD(address, ctypes.addressof(source), len(data)))

    return Gpu(driver, read, write, driver.granularity)
