"""The picture of what was measured, from a stand-in's records."""

from pathlib import Path
from typing import Any

import pytest

from bench.gpu.__main__ import main
from bench.gpu.machine import environment
from bench.gpu.pieces import PIECES
from bench.gpu.plot import PANELS, draw, figure_of
from bench.gpu.runner import write_done
from bench.gpu.sizes import Sizes
from tests.fakes.gpu import CARD, IDLE, MEASURED


def record(name: str) -> dict[str, Any]:
    (piece,) = (piece for piece in PIECES if piece.name == name)
    measured = MEASURED[name]
    return {
        "piece": name,
        "sizes": piece.told(Sizes()),
        "environment": environment(CARD, IDLE, "0123456789ab"),
        "measured": measured,
        "checks": piece.checks(measured),
    }


def texts(names: tuple[str, ...]) -> str:
    figure = figure_of({name: record(name) for name in names})
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    return "\n".join([figure.get_suptitle(), *titles, *found])


def test_every_piece_has_a_panel() -> None:
    # A panel is drawn of what a piece measured, so a new piece needs one.
    assert PANELS.keys() == {piece.name for piece in PIECES} == MEASURED.keys()


@pytest.mark.parametrize("name", sorted(MEASURED))
def test_one_piece_alone_makes_a_picture(tmp_path: Path, name: str) -> None:
    write_done(tmp_path, record(name))
    path = draw(tmp_path)
    assert path == tmp_path / "gpu.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_all_of_them_are_in_one_picture_with_their_figures(tmp_path: Path) -> None:
    for name in MEASURED:
        write_done(tmp_path, record(name))
    assert draw(tmp_path)
    shown = texts(tuple(MEASURED))
    for figure in (
        "Stand-in GPU, driver 580.00, commit 0123456789ab",
        "40 passed, none skipped",
        "left out: pages, needs cuda",
        "4,300",  # GB/s within the card
        "0.65",  # the diff's share of it
        "31.0",  # ms to overwrite 2% of 8 billion
        "2.0% of 8.0 billion weights",
        "98.8",  # ms to create the pages of a gibibyte
        "165",  # ms for a gibibyte through the driver
        "21",
        "busy 0.61, 7.5/s, 240 requests an arm",
        "generated bursts: busy 0.61",
        "1,500/s, 0.87 of idle",  # a guest's tokens
        "1,500/s, 0.55 of spare",
        "43.0",  # ms of an update's pause
        "host's TTFT p90 ×1.02",
    ):
        assert figure in shown, figure


def test_a_picture_of_a_rehearsal_says_that_it_shows_nothing() -> None:
    rehearsed = record("serve60") | {"rehearsal": "a rehearsal: no figure means anything"}
    assert "A REHEARSAL: NO FIGURE" in figure_of({"serve60": rehearsed}).get_suptitle()


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    assert draw(tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_results_from_elsewhere_are_drawn_without_a_card(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--draw", str(tmp_path)]) == 2
    assert "nothing to draw in" in capsys.readouterr().err
    write_done(tmp_path, record("serve60"))
    assert main(["--draw", str(tmp_path)]) == 0
    assert (tmp_path / "gpu.png").is_file()
