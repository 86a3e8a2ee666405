"""Piece `pages`: what a physical page costs, and a gibibyte from a guest's process to a host's."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from executor.cuda.bindings import open_driver
from rose.bench.gpu.sizes import Sizes
from rose.bench.gpu.work import page_balloon
from rose.bench.gpu.work.page_driver import OPENER, opened
from rose.bench.gpu.work.page_host import Times, by_handle, guest_process, through_driver
from rose.bench.gpu.work.page_range import PageRange
from rose.bench.gpu.work.timing import spread

GIB = 1 << 30


def run(sizes: Sizes, place: str) -> dict[str, Any]:
    """Measure with the backend of this tree: pages as such, then under a KV balloon."""
    measured = measure(OPENER, sizes.rounds, GIB)
    return measured | {
        "balloon": page_balloon.measure(open_driver(), measured["pages"], sizes.rounds)
    }


def measure(opener: str, rounds: int, moved_bytes: int) -> dict[str, Any]:
    """Move `moved_bytes` so many times within a process, then between two.

    `each_s`: one call for one page. `at_once_s`: one call for all of them. In both ways between
    processes, `moved_s` is from the host's word until it may use zeroed pages.
    """
    driver = opened(opener)
    pages = moved_bytes // driver.granularity
    memory = PageRange(driver, pages)
    each: Times = {}
    at_once: Times = {}
    for _ in range(rounds):
        _round(memory, each, at_once)
    memory.close()
    with guest_process(opener, pages) as guest:
        ways = {
            "through_driver": through_driver(driver, guest, pages, rounds),
            "by_handle": by_handle(driver, guest, pages, rounds),
        }
    return {
        "page_bytes": driver.granularity,
        "pages": pages,
        "each_s": _spreads(each),
        "at_once_s": _spreads(at_once),
        **{name: _spreads(times) for name, times in ways.items()},
    }


def _round(memory: PageRange, each: Times, at_once: Times) -> None:
    """Page by page with access and zeroes for each alone, then again with both for all at once."""
    numbers = range(memory.pages)
    handles = [_timed(each, "create", memory.create) for _ in numbers]
    for page, handle in enumerate(handles):
        _timed(each, "map", partial(memory.map, page, handle))
    for page in numbers:
        _timed(each, "access", partial(memory.allow, page, 1))
    for page in numbers:
        _timed(each, "zero", partial(memory.zero, page, 1))
    for page in numbers:
        _timed(each, "unmap", partial(memory.unmap, page))
    for page, handle in enumerate(handles):
        memory.map(page, handle)
    _timed(at_once, "access", partial(memory.allow, 0, memory.pages))
    _timed(at_once, "zero", partial(memory.zero, 0, memory.pages))
    memory.unmap_all()
    for handle in handles:
        _timed(each, "release", partial(memory.release, handle))


def _timed(times: Times, name: str, work: Callable[[], Any]) -> Any:  # noqa: ANN401 -- work's own
    started_s = time.perf_counter()
    found = work()
    times.setdefault(name, []).append(time.perf_counter() - started_s)
    return found


def _spreads(times: Times) -> dict[str, dict[str, float]]:
    return {name: spread(values) for name, values in times.items()}
