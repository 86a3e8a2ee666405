"""The pieces of one process: engines are started once, and each piece gets a part of the time.

    start ── piece ── piece ── … ── end
             each is told how long it may take: what is left, in equal parts over the pieces
             that can still have their least time; the others are left for another process

A piece that fails ends the process: what its engines are worth then, nobody knows. The runner
starts another one for the pieces that have not been answered.
"""

import asyncio
import importlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.pieces import GpuPiece, Measured, PieceError
from bench.gpu.serve.session import opened_session
from bench.gpu.sizes import Sizes
from rose.engines import Device

# To end three engines and write the answer.
END_S = 15.0

Answer = Callable[[GpuPiece, Measured], None]


def measure_all(
    pieces: Sequence[GpuPiece],
    sizes: Sizes,
    place: str,
    seconds: float,
    folders: tuple[Path, Path],
    answer: Answer,
) -> None:
    """Measure as many of the pieces as fit into `seconds`, in order, at least the first.

    folders: of logs and raw records, and of results. Raises RoseError in one line when a piece, or
    the engines' start, failed; pieces before it have been answered.
    """
    until_s = time.monotonic() + seconds - END_S
    asyncio.run(_measure(pieces, sizes, Device(place), until_s, folders, answer))


async def _measure(
    pieces: Sequence[GpuPiece],
    sizes: Sizes,
    device: Device,
    until_s: float,
    folders: tuple[Path, Path],
    answer: Answer,
) -> None:
    logs, kept = folders
    # Raw records and logs of these engines alone.
    folder = logs / f"engines-{os.getpid()}"
    folder.mkdir(parents=True)
    known_weights = any(piece.known_weights for piece in pieces)
    async with opened_session(
        sizes.serving, device, folder, kept, until_s, known_weights=known_weights
    ) as session:
        waiting = [(piece, piece.least_s(sizes)) for piece in pieces]
        first, least_s = waiting[0]
        if session.left_s < least_s:
            raise PieceError(
                f"the engines took {session.start_s:.0f} s to start and {session.left_s:.0f} s are"
                f" left, of which {first.name} needs {least_s:.0f}: give a larger --budget-s or a"
                " shorter --arm-s"
            )
        while waiting and session.left_s >= waiting[0][1]:
            share_s = session.left_s / _fitting([least_s for _, least_s in waiting], session.left_s)
            piece, _ = waiting.pop(0)
            try:
                async with asyncio.timeout(session.left_s):
                    answer(piece, await _work(piece)(session, share_s))
            except TimeoutError as error:
                raise PieceError(
                    f"not done in what was left of its process; see {folder}"
                ) from error


def _fitting(least: Sequence[float], left_s: float) -> int:
    """How many pieces, from the first on, have their least time in what is left."""
    return sum(passed_s <= left_s for passed_s in itertools.accumulate(least))


def _work(piece: GpuPiece) -> Any:  # noqa: ANN401 -- a coroutine function of (session, seconds)
    module, _, function = piece.work.partition(":")
    return getattr(importlib.import_module(module), function)
