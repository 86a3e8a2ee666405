"""The rules of a GPU's driver that the pages rely on: the stand-in's are those of the real one."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cuda_cases import ZEROS, Gpu, gpu

from executor import cuda
from executor.cuda import driver as cuda_driver
from executor.errors import DeviceError, DeviceMemoryShort

__all__ = ["gpu"]


def mapped(gpu: Gpu, pages: int = 2) -> tuple[int, list[Any]]:
    """Addresses of `pages` pages with one more behind them, and the handles of the first."""
    driver, size = gpu.driver, gpu.page_bytes
    base = driver.reserve((pages + 1) * size)
    handles = [driver.create(size) for _ in range(pages)]
    for number, handle in enumerate(handles):
        driver.map(base + number * size, size, handle)
    return base, handles


def unmapped(gpu: Gpu, base: int, handles: list[Any], *, still: int) -> None:
    for number in range(still):
        gpu.driver.unmap(base + number * gpu.page_bytes, gpu.page_bytes)
    gpu.driver.unreserve(base, (len(handles) + 1) * gpu.page_bytes)
    for handle in handles:
        gpu.driver.release(handle)


def test_a_run_of_mappings_is_made_usable_in_one_call(gpu: Gpu) -> None:
    base, handles = mapped(gpu)
    gpu.driver.set_access(base, 2 * gpu.page_bytes)
    gpu.driver.fill(base, 7, 2 * gpu.page_bytes)
    gpu.driver.synchronize()
    assert gpu.read(base + gpu.page_bytes - 32, 32) == bytes([7] * 32)
    assert gpu.read(base + gpu.page_bytes, 32) == bytes([7] * 32)
    unmapped(gpu, base, handles, still=2)


def test_what_is_against_the_rules_is_refused(gpu: Gpu) -> None:
    driver, size = gpu.driver, gpu.page_bytes
    base, handles = mapped(gpu)
    with pytest.raises(DeviceError):
        driver.map(base, size, handles[1])
    with pytest.raises(DeviceError):
        driver.map(base + 2 * size + 4096, size, handles[1])
    with pytest.raises(DeviceError):
        driver.set_access(base, 3 * size)
    with pytest.raises(DeviceError):
        driver.unmap(base + 2 * size, size)
    with pytest.raises(DeviceError):
        driver.create(size + 4096)
    unmapped(gpu, base, handles, still=2)


def test_one_page_backs_several_addresses_and_outlives_its_handle(gpu: Gpu) -> None:
    driver, size = gpu.driver, gpu.page_bytes
    base = driver.reserve(2 * size)
    handle = driver.create(size)
    for at in (base, base + size):
        driver.map(at, size, handle)
    driver.set_access(base, 2 * size)
    driver.release(handle)
    gpu.write(base, gpu.pattern(1))
    assert gpu.read(base + size, len(ZEROS)) == gpu.pattern(1)
    for at in (base, base + size):
        driver.unmap(at, size)
    driver.unreserve(base, 2 * size)


def test_an_exported_page_is_the_same_memory_where_it_is_imported(gpu: Gpu) -> None:
    driver, size = gpu.driver, gpu.page_bytes
    base = driver.reserve(2 * size)
    own = driver.create(size)
    descriptor = driver.export_handle(own)
    foreign = driver.import_handle(descriptor)
    os.close(descriptor)
    driver.map(base, size, own)
    driver.map(base + size, size, foreign)
    driver.set_access(base, 2 * size)
    gpu.write(base, gpu.pattern(2))
    assert gpu.read(base + size, len(ZEROS)) == gpu.pattern(2)
    for at, handle in ((base, own), (base + size, foreign)):
        driver.unmap(at, size)
        driver.release(handle)
    driver.unreserve(base, 2 * size)


def test_free_memory_falls_by_what_is_created_and_comes_back(gpu: Gpu) -> None:
    pages = 16
    before = gpu.driver.free_bytes()
    handles = [gpu.driver.create(gpu.page_bytes) for _ in range(pages)]
    assert before - gpu.driver.free_bytes() >= pages * gpu.page_bytes
    for handle in handles:
        gpu.driver.release(handle)
    assert gpu.driver.free_bytes() >= before


class Results:
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2


def refusing(code: int) -> cuda_driver.Driver:
    driver = object.__new__(cuda_driver.Driver)
    driver._cuda = SimpleNamespace(CUresult=Results, cuMemRelease=lambda _handle: (code,))
    return driver


def test_a_result_of_the_driver_is_one_clear_line() -> None:
    refusing(0).release(cuda_driver.Handle(1))
    with pytest.raises(DeviceMemoryShort, match=r"^cuMemRelease: the GPU is out of memory"):
        refusing(2).release(cuda_driver.Handle(1))
    with pytest.raises(DeviceError, match=r"^cuMemRelease failed with 700;"):
        refusing(700).release(cuda_driver.Handle(1))


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(DeviceError, match=r"install rose-rollout\[cuda\]"):
        cuda_driver.open_driver()


def test_a_machine_without_a_gpu_does_not_notice() -> None:
    """All of it can be imported, and nothing of it asks for a package of CUDA's, or for torch."""
    folder = Path(cuda.__path__[0])
    names = [
        ".".join(("executor.cuda", *path.relative_to(folder).with_suffix("").parts))
        for path in folder.rglob("*.py")
    ]
    assert len(names) == 6
    code = f"import sys, importlib; [importlib.import_module(name) for name in {names}]"
    code += "; assert not {'cuda', 'torch', 'cupy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
