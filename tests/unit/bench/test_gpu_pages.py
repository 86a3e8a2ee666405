"""The piece that moves pages, over a stand-in for the driver, between two real processes."""

import os
from collections import Counter
from pathlib import Path

import pytest
import standin_pages
from standin_pages import PAGE_BYTES

from bench.gpu.limits import page_checks
from bench.gpu.pieces import PieceError
from bench.gpu.work.pages import measure

PAGES, ROUNDS = 130, 3


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)


def test_each_call_is_timed_and_a_run_moves_in_both_ways() -> None:
    found = measure("standin_pages:open_pages", ROUNDS, PAGES * PAGE_BYTES)
    assert (found["page_bytes"], found["pages"]) == (PAGE_BYTES, PAGES)
    calls = {name: spread["count"] for name, spread in found["each_s"].items()}
    each = ("create", "map", "access", "zero", "unmap", "release")
    assert calls == dict.fromkeys(each, PAGES * ROUNDS)
    assert {name: spread["count"] for name, spread in found["at_once_s"].items()} == {
        "access": ROUNDS,
        "zero": ROUNDS,
    }
    for way in ("through_driver", "by_handle"):
        moved, given, taken = (found[way][f"{name}_s"] for name in ("moved", "given", "taken"))
        assert moved["count"] == ROUNDS
        assert 0 < given["least"] < moved["most"]
        assert 0 < taken["least"] < moved["most"]
    assert found["by_handle"]["shared_s"]["count"] == 1
    (check,) = page_checks(found)
    assert check["value"] == found["by_handle"]["moved_s"]["p50"]


def test_nothing_is_left_and_by_handle_no_page_is_created() -> None:
    standin_pages.OPENED.clear()
    measure("standin_pages:open_pages", ROUNDS, PAGES * PAGE_BYTES)
    (host,) = standin_pages.OPENED
    assert not host.mapped
    assert not host.handles
    assert not host.reserved
    calls = Counter(host.calls)
    # Within the process and through the driver; handles of others come without.
    assert calls["create"] == 2 * ROUNDS * PAGES
    # Twice within the process, and once in each way between processes.
    assert calls["map"] == 4 * ROUNDS * PAGES
    assert calls[f"access {PAGES}"] == 3 * ROUNDS


def test_a_guest_that_cannot_start_ends_the_piece_in_one_line() -> None:
    with pytest.raises(PieceError, match=r"^the guest's process ended in the middle; see the log$"):
        measure("standin_pages:open_only_for_the_host", ROUNDS, PAGES * PAGE_BYTES)
