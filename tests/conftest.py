"""Shared by all tests: how many examples property tests draw, and the tiers that `make` runs.

HYPOTHESIS_PROFILE chooses: dev (25 examples) is the default, ci draws 100 and nightly 1000. The
first two draw the same examples each time, so that a run of them proves the same thing twice;
nightly draws new ones. A test that wants more than others says how many times as many.
"""

import gc
import os
import sys

import pytest
from hypothesis import HealthCheck, settings

from executor.control_page.page import PAGE_FOLDER
from rose import addresses

# Imported modules stay: scanning them for garbage again and again takes a seventh of the time in
# which
# tests are collected, and most of each full collection later.
gc.disable()

# A socket that a test left to the collector is no line on the standard error of whichever test runs
# by then. pytest's own hook (left out in pyproject.toml) collects five times at the end.
sys.unraisablehook = lambda _: None

EXAMPLES = {"dev": 25, "ci": 100, "nightly": 1000}

# Control pages are taken in memory alone, and tests make theirs in tmp_path: all folders of tests
# are in memory. Only pytest reads this variable.
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", PAGE_FOLDER)

# Each process of tests has ports of its own: a test of another could take one before it is used.
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_share = len(addresses.FREE) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
addresses.FREE = addresses.FREE[_worker * _share : (_worker + 1) * _share]

for _name, _count in EXAMPLES.items():
    settings.register_profile(
        _name,
        max_examples=_count,
        derandomize=_name != "nightly",
        print_blob=True,
        # A shared machine stalls now and then: how long one example takes is no property of code.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--max-engine-starts", type=int, metavar="N", help="fail once tests start more engines"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that need no engine as unit tests."""
    for item in items:
        if item.get_closest_marker("engine") is None:
            item.add_marker(pytest.mark.unit)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
