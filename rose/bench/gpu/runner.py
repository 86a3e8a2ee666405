"""The pieces in order: each is measured, kept, left for later, or says why not."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rose.bench.gpu.environment import environment
from rose.bench.gpu.errors import PieceError
from rose.bench.gpu.piece import Measured, Piece
from rose.bench.gpu.preflight import insist_alone, insist_room
from rose.bench.gpu.records import Record, folder_of, read_done, write_done, write_failed
from rose.bench.gpu.sizes import Sizes
from rose.bench.gpu.watch import Watch
from rose.nvml import Card, CardError, CardReader, Usage

State = Literal["done", "kept", "failed", "lacking", "left"]
Measure = Callable[[Piece, Sizes, Card, Path], Measured]
Say = Callable[[str], None]
# A driver takes memory back a moment after its process has ended.
SETTLED_S, SETTLED_BYTES, POLL_S = 10.0, 64 << 20, 0.1
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be measured. budget_s: no piece begins that is not expected to end within it.

    named: the pieces were asked for by name, so one that cannot run has failed.
    """

    pieces: tuple[Piece, ...]
    sizes: Sizes
    out: Path
    logs: Path
    revision: str
    resume: bool = True
    budget_s: float | None = None
    named: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a piece; `record` of what was measured, now or before."""

    piece: str
    state: State
    said: str = ""
    record: Record | None = None

    @property
    def good(self) -> bool:
        """Neither it nor one of its limits failed."""
        checks = self.record["checks"] if self.record else ()
        return self.state != "failed" and all(check["verdict"] != "FAILS" for check in checks)


class Runner:
    """Measures on one card, which nobody else uses."""

    def __init__(self, reader: CardReader, card: Card, request: Request, measure: Measure) -> None:
        self._reader = reader
        self._card = card
        self._request = request
        self._measure = measure
        self._folder = folder_of(request.out, card.name)
        self._began_s = time.monotonic()

    def insist_room(self, usage: Usage) -> None:
        """Raise CardError when a piece that is going to run would not fit."""
        waiting = [piece for piece in self._request.pieces if self._settled(piece) is None]
        largest = max(waiting, key=self._bytes, default=None)
        if largest is not None:
            insist_room(self._card, usage, self._bytes(largest), largest.name)

    def run(self, say: Say) -> list[Outcome]:
        """Go through all pieces."""
        outcomes = []
        for outcome in self._outcomes(say):
            say(line_of(outcome))
            outcomes.append(outcome)
        return outcomes

    def _outcomes(self, say: Say) -> Iterator[Outcome]:
        over = False
        for piece in self._request.pieces:
            settled = self._settled(piece)
            if settled is not None:
                yield settled
                continue
            over = over or not self._fits(piece)
            if over:
                yield Outcome(piece.name, "left", "does not fit in what is left of the budget")
                continue
            say(f"{piece.name:<8} {piece.what}: about {piece.estimate_s:.0f} s")
            yield self._measured(piece)

    def _settled(self, piece: Piece) -> Outcome | None:
        """What is known without the card, None when the piece is to be measured."""
        request = self._request
        if missing := piece.missing():
            return Outcome(piece.name, "failed" if request.named else "lacking", missing)
        record = read_done(self._folder, piece.name) if request.resume else None
        if record is not None and self._same(record):
            return Outcome(piece.name, "kept", "measured before with this commit", record)
        return None

    def _same(self, record: Record) -> bool:
        same_code = record["environment"]["commit"] == self._request.revision
        return bool(same_code and record["sizes"] == asdict(self._request.sizes))

    def _fits(self, piece: Piece) -> bool:
        budget_s = self._request.budget_s
        spent_s = time.monotonic() - self._began_s
        return budget_s is None or spent_s + piece.estimate_s <= budget_s

    def _bytes(self, piece: Piece) -> int:
        return piece.memory(self._request.sizes)

    def _measured(self, piece: Piece) -> Outcome:
        request = self._request
        record: Record = {
            "piece": piece.name, "what": piece.what, "sizes": asdict(request.sizes),
        }  # fmt: skip
        try:
            before = self._reader.usage(self._card)
            record["environment"] = environment(self._card, before, request.revision)
            insist_alone(self._card, before)
            insist_room(self._card, before, self._bytes(piece), piece.name)
            record |= self._left_as_found(piece, before)
        except (PieceError, CardError) as error:
            record["failed"] = str(error)
            write_failed(self._folder, record)
            return Outcome(piece.name, "failed", str(error))
        record["checks"] = piece.checks(record["measured"])
        path = write_done(self._folder, record)
        return Outcome(piece.name, "done", f"{record['took_s']:.0f} s, {path}", record)

    def _left_as_found(self, piece: Piece, before: Usage) -> Record:
        """Measure, and wait until nothing of it is left on the card, however it ended."""
        try:
            found = self._watched(piece)
        except PieceError as error:
            try:
                self._insist_left_as_found(before)
            except PieceError as other:
                raise PieceError(f"{error}; then {other}") from error
            raise
        self._insist_left_as_found(before)
        return found

    def _watched(self, piece: Piece) -> Record:
        request = self._request
        started_s = time.monotonic()
        with Watch(self._reader, self._card) as watch:
            log = request.logs / f"{piece.name}.log"
            measured = self._measure(piece, request.sizes, self._card, log)
        took_s = time.monotonic() - started_s
        return {"took_s": took_s, "during": watch.summary(), "measured": measured}

    def _insist_left_as_found(self, before: Usage) -> None:
        deadline_s = time.monotonic() + SETTLED_S
        while True:
            now = self._reader.usage(self._card)
            kept_bytes = now.used_bytes - before.used_bytes
            if not now.processes and kept_bytes <= SETTLED_BYTES:
                return
            if time.monotonic() >= deadline_s:
                raise PieceError(
                    f"the card is not as it was found: {max(0, kept_bytes) // MIB} MiB more in use,"
                    f" processes {list(now.processes)}; end what is left of the piece"
                )
            time.sleep(POLL_S)


def line_of(outcome: Outcome) -> str:
    """A piece's end, and its limits, in a line."""
    checks = outcome.record["checks"] if outcome.record else []
    told = [f"{c['check']} {c['value']:.3g} (limit {c['limit']:g}) {c['verdict']}" for c in checks]
    return "; ".join([f"{outcome.piece:<8} {outcome.state}: {outcome.said}", *told])


def summary(outcomes: Iterable[Outcome]) -> str:
    """How many pieces came to what."""
    states = [outcome.state for outcome in outcomes]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    again = "; run it again for what is left" if "left" in states else ""
    return f"{len(states)} pieces: {counted}{again}"
