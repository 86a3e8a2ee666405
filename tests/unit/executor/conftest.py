"""Fixtures that end whatever tests of the executor leave running in their process."""

import threading
from collections.abc import Iterator

import pytest

from executor.control_page.host_seat import Beat


@pytest.fixture(autouse=True)
def _no_beat_outlives_its_test() -> Iterator[None]:
    """A host beats until its process ends; hundreds of tests' hosts would slow all that follow."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if isinstance(thread, Beat):
            thread.stop()
