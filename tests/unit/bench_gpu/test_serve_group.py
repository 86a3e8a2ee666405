"""One set of engines for several pieces: time is shared, and what does not fit is not begun."""

import argparse
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.coserve.records import Calibration
from bench.gpu import measure
from bench.gpu.pieces import PieceError, ServingSizes, Sizes, pieces_of
from bench.gpu.serving import KeptRates
from rose.errors import ConfigError

SERVED = pieces_of(("serve60", "bursts", "serve30", "serve90"))
STEADY_S, BURSTS_S = (SERVED[k].least_s(Sizes()) for k in (0, 1))


class TimedSession:
    """Time that passes as the test says; nothing is played."""

    def __init__(self, left_s: float, start_s: float = 100.0) -> None:
        self.left_s = left_s
        self.start_s = start_s
        self.sizes = ServingSizes()
        self.played: list[Any] = []


def measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, left_s: float, uses: float = 1.0
) -> list[tuple[str, float]]:
    """(piece, seconds that it was given); `uses`: share of them that it takes."""
    session = TimedSession(left_s)
    answers: list[tuple[str, float]] = []

    @asynccontextmanager
    async def opened(*_: object, **__: object) -> AsyncIterator[TimedSession]:
        yield session

    async def work(found: TimedSession, seconds: float) -> dict[str, Any]:
        found.left_s -= uses * seconds
        return {"seconds": seconds}

    monkeypatch.setattr("bench.gpu.serving.opened_session", opened)
    monkeypatch.setattr("bench.gpu.kernels.insist_device", lambda place: None)
    monkeypatch.setattr(measure, "function_of", lambda name: work)
    monkeypatch.setattr(
        measure,
        "_write",
        lambda _, piece, said: answers.append((piece, said["measured"]["seconds"])),
    )
    args = argparse.Namespace(
        place="cpu", seconds=500.0, logs=tmp_path, kept=tmp_path, out=tmp_path
    )
    measure.PieceWork(SERVED, Sizes(), args).run()
    return answers


def test_what_is_left_is_shared_by_as_many_pieces_as_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left_s = STEADY_S + BURSTS_S + 40
    found = measured(monkeypatch, tmp_path, left_s)
    assert [name for name, _ in found] == ["serve60", "bursts"]
    assert sum(seconds for _, seconds in found) == pytest.approx(left_s)
    assert found[0][1] == pytest.approx(left_s / 2)


def test_what_a_piece_does_not_take_is_the_next_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = measured(monkeypatch, tmp_path, STEADY_S + BURSTS_S + 40, uses=0.1)
    assert [name for name, _ in found] == [piece.name for piece in SERVED]


def test_engines_that_started_too_slowly_for_any_piece_are_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told = r"^the engines took 100 s to start and 50 s are left, of which serve60 needs \d+: give "
    with pytest.raises(PieceError, match=told) as caught:
        measured(monkeypatch, tmp_path, 50.0)
    assert "\n" not in str(caught.value)


def test_a_rate_is_kept_for_the_same_host_and_searched_anew_for_another(tmp_path: Path) -> None:
    path = tmp_path / "results" / "rates.json"
    host = {"model": "7b", "kv_bytes": 1}
    rates = KeptRates(path, host)
    assert rates.get(0.6, "poisson") is None
    found = Calibration(0.6, "poisson", 7.5, [(7.5, 0.61)])
    rates.put(found)
    assert KeptRates(path, host).get(0.6, "poisson") == found
    assert KeptRates(path, host).get(0.3, "poisson") is None
    assert KeptRates(path, host | {"model": "8b"}).get(0.6, "poisson") is None
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"rates\.json is damaged \(.*\); delete it"):
        KeptRates(path, host)
