"""Two processes on one real GPU: what one lends is the memory that the other writes to."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cuda_cases import ZEROS, Gpu, device_gpu

from executor.cuda.backing import VirtualMapping
from executor.cuda.page_pool import PagePool
from executor.cuda.page_server import PageServer

PAGES = 4
BORROWER = Path(__file__).with_name("cuda_borrower_main.py")


def wait_for(lender: PageServer, done: Callable[[], bool], within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not done():
        assert time.monotonic() < end, "it did not happen"
        lender.step()


def first_bytes(gpu: Gpu, lender: PageServer) -> bytes:
    """Return the content of a page of the stock, which is put back."""
    mapping = VirtualMapping(gpu.driver, gpu.page_bytes, 1)
    mapping.back([0], lender.take(1))
    found = gpu.read(mapping.address(0), len(ZEROS))
    lender.give(mapping.close())
    lender.recall(PAGES)
    return found


def test_a_lent_page_is_written_to_returned_and_the_rest_is_back_after_a_kill(
    tmp_path: Path,
) -> None:
    gpu = device_gpu()
    free = gpu.driver.free_bytes()
    pool = PagePool(gpu.driver, gpu.page_bytes)
    lender = PageServer(gpu.driver, gpu.page_bytes, tmp_path / "pages", pool)
    lender.give(pool.take(PAGES))
    command = [sys.executable, str(BORROWER), str(tmp_path / "pages"), str(PAGES)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True
    ) as child:
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            wait_for(lender, lambda: lender.lent == PAGES)
            assert child.stdout.readline() == "mapped\n"
            lender.recall(1)  # What comes back is not to be lent again.
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "returned\n"
            wait_for(lender, lambda: lender.idle == 1)
            assert first_bytes(gpu, lender) == gpu.pattern(0), "as the other process wrote them"
            assert lender.lent == PAGES - 1
        finally:
            child.kill()
        wait_for(lender, lambda: lender.lent == 0)
    lender.close()
    assert gpu.driver.free_bytes() >= free
