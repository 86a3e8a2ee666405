"""The picture of what was measured, from a stand-in's records."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.machine import environment
from bench.gpu.pieces import PIECES
from bench.gpu.plot import draw
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
        "checks": [asdict(check) for check in piece.checks(measured)],
    }


@pytest.mark.parametrize("name", sorted(MEASURED))
def test_one_piece_alone_makes_a_picture(tmp_path: Path, name: str) -> None:
    write_done(tmp_path, record(name))
    path = draw(tmp_path)
    assert path == tmp_path / "gpu.png"
    assert path.read_bytes().startswith(b"\x89PNG")
