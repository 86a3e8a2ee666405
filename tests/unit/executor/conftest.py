"""Control page of a test, and an end of whatever tests of the executor leave running."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor import ControlPage
from executor.control_page.host_seat import Beat


@pytest.fixture
def page(tmp_path: Path) -> Iterator[ControlPage]:
    with ControlPage.create(tmp_path / "page") as made:
        yield made


@pytest.fixture(autouse=True)
def _no_beat_outlives_its_test() -> Iterator[None]:
    """A host beats until its process ends; hundreds of tests' hosts would slow all that follow."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        if isinstance(thread, Beat):
            thread.stop()
