"""Work on chunks side by side, with few of them in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    pool: Executor, threads: int, work: Callable[[Item], Result], items: Iterable[Item]
) -> Iterator[Result]:
    """Results in the order of items; as many at once as there are threads, so that few wait."""
    pending: deque[Future[Result]] = deque()
    for item in items:
        pending.append(pool.submit(work, item))
        if len(pending) > threads:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
