"""Runs of the GPU command with stand-ins for the driver and for the pieces' processes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.gpu.measure import Answered, PieceOrder
from bench.gpu.pieces import Sizes, pieces_of
from bench.gpu.runner import Outcome, Runner, RunRequest
from tests.fakes.gpu import MEASURED, StandInReader, card

COPY, KERNELS, UPDATE = pieces_of(("copy", "kernels", "update"))


class Measuring:
    """In place of the pieces' processes: says which were asked, and fails where told."""

    def __init__(self, **wrong: str) -> None:
        self.wrong = wrong
        self.asked: list[str] = []
        self.orders: list[PieceOrder] = []

    def __call__(self, order: PieceOrder) -> Iterator[Answered]:
        self.orders.append(order)
        for piece in order.pieces:
            self.asked.append(piece.name)
            if piece.name in self.wrong:
                yield Answered(piece, failed=self.wrong[piece.name])
                return
            yield Answered(piece, MEASURED[piece.name])


def request(tmp_path: Path, **changes: Any) -> RunRequest:
    plain = RunRequest(
        pieces=(COPY, KERNELS, UPDATE),
        sizes=Sizes(),
        out=tmp_path,
        logs=tmp_path / "logs",
        revision="abc",
    )
    return replace(plain, **changes)


def run(
    asked: RunRequest, measure: Measuring, reader: StandInReader | None = None
) -> dict[str, Outcome]:
    runner = Runner(reader or StandInReader(card()), card(), asked, measure)
    return {outcome.piece: outcome for outcome in runner.run(lambda line: None)}


def states(outcomes: dict[str, Outcome]) -> dict[str, str]:
    return {name: outcome.state for name, outcome in outcomes.items()}


def files(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "stand-in-gpu").iterdir()}
