"""The pieces in order: each is measured, kept, left for later, or says why not."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rose.bench.gpu.environment import environment
from rose.bench.gpu.errors import PieceError
from rose.bench.gpu.limits import Check
from rose.bench.gpu.piece import MOST_S, Piece
from rose.bench.gpu.preflight import insist_alone, insist_room
from rose.bench.gpu.process import Measure, Order
from rose.bench.gpu.records import Record, folder_of, read_done, write_done, write_failed
from rose.bench.gpu.sizes import Sizes
from rose.bench.gpu.watch import Watch
from rose.nvml import Card, CardError, CardReader, Usage

State = Literal["done", "kept", "failed", "lacking", "left"]
Say = Callable[[str], None]
# A driver takes memory back a moment after its process has ended.
SETTLED_S, SETTLED_BYTES, POLL_S = 10.0, 64 << 20, 0.1
MIB = 1 << 20
FEW_CHECKS = 3
NO_CLAIM = "a rehearsal on CPUs with tiny models: no figure in here says anything about a GPU"


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be measured. budget_s: no piece begins that is not expected to end within it.

    named: the pieces were asked for by name, so one that cannot run has failed.
    rehearsal: not on a card, so no figure means anything and no limit can fail.
    """

    pieces: tuple[Piece, ...]
    sizes: Sizes
    out: Path
    logs: Path
    revision: str
    resume: bool = True
    budget_s: float | None = None
    named: bool = False
    rehearsal: bool = False


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
        checks = self.record["checks"] if self.record and "rehearsal" not in self.record else ()
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
        waiting = list(self._request.pieces)
        while waiting:
            piece = waiting[0]
            settled = self._settled(piece)
            if settled is not None:
                yield settled
                waiting.remove(piece)
                continue
            over = over or piece.takes_s(self._request.sizes) > self._left_s
            if over:
                yield Outcome(piece.name, "left", "does not fit in what is left of the budget")
                waiting.remove(piece)
                continue
            together = self._together(waiting)
            for one in together:
                say(f"{one.name:<8} {one.what}: about {one.takes_s(self._request.sizes):.0f} s")
            for outcome in self._measured(together):
                yield outcome
                waiting = [other for other in waiting if other.name != outcome.piece]

    def _together(self, waiting: list[Piece]) -> tuple[Piece, ...]:
        """The first, and all others that can share its process, while it lasts."""
        first = waiting[0]
        if not first.group:
            return (first,)
        return tuple(
            piece
            for piece in waiting
            if self._goes_with(first, piece) and self._settled(piece) is None
        )

    def _goes_with(self, first: Piece, piece: Piece) -> bool:
        """Whether the same engines do for both; tiny weights are made in no time."""
        alike = self._request.rehearsal or piece.known_weights == first.known_weights
        return piece.group == first.group and alike

    def _settled(self, piece: Piece) -> Outcome | None:
        """What is known without the card, None when the piece is to be measured."""
        request = self._request
        if missing := piece.missing():
            return Outcome(piece.name, "failed" if request.named else "lacking", missing)
        record = read_done(self._folder, piece.name) if request.resume else None
        if record is not None and self._same(piece, record):
            return Outcome(piece.name, "kept", "measured before with this commit", record)
        return None

    def _same(self, piece: Piece, record: Record) -> bool:
        same_code = record["environment"]["commit"] == self._request.revision
        return bool(same_code and record["sizes"] == piece.told(self._request.sizes))

    @property
    def _left_s(self) -> float:
        budget_s = self._request.budget_s
        return math.inf if budget_s is None else self._began_s + budget_s - time.monotonic()

    def _bytes(self, piece: Piece) -> int:
        return piece.memory(self._request.sizes)

    def _measured(self, pieces: tuple[Piece, ...]) -> Iterator[Outcome]:
        """What became of each piece that the process began, at least of the first.

        Several share what their engines did, so each is kept as soon as it is known: a process that
        is ended from outside leaves what it has measured.
        """
        try:
            before = self._reader.usage(self._card)
            facts = environment(self._card, before, self._request.revision)
            insist_alone(self._card, before)
            for piece in pieces:
                insist_room(self._card, before, self._bytes(piece), piece.name)
        except CardError as error:
            yield self._failed(pieces[0], {}, str(error))
            return
        found: list[tuple[Piece, Record]] = []
        with Watch(self._reader, self._card) as watch:
            began_s = time.monotonic()
            for answer in self._measure(self._order(pieces)):
                record: Record = {"took_s": time.monotonic() - began_s, "environment": facts}
                record |= {"measured": answer.measured, "failed": answer.failed}
                found.append((answer.piece, record))
                if len(pieces) > 1 and answer.measured is not None:
                    self._done(answer.piece, record | {"during": watch.summary()})
        left = self._left_as_found(before)
        during = {"during": watch.summary()}
        for piece, record in found:
            yield self._outcome(piece, record | during, left)

    def _order(self, pieces: tuple[Piece, ...]) -> Order:
        request, first = self._request, pieces[0]
        seconds = first.limit_s
        if first.group:
            seconds = min(MOST_S, self._left_s)
        return Order(pieces, request.sizes, self._card, seconds, request.logs, self._folder)

    def _outcome(self, piece: Piece, record: Record, left: str) -> Outcome:
        said = "; then ".join(filter(None, [record.pop("failed"), left]))
        if said:
            del record["measured"]
            return self._failed(piece, record, said)
        return self._done(piece, record)

    def _done(self, piece: Piece, record: Record) -> Outcome:
        kept = self._described(piece) | record
        kept.pop("failed", None)
        kept["checks"] = piece.checks(kept["measured"])
        path = write_done(self._folder, kept)
        return Outcome(piece.name, "done", f"{kept['took_s']:.0f} s, {path}", kept)

    def _failed(self, piece: Piece, record: Record, said: str) -> Outcome:
        write_failed(self._folder, self._described(piece) | record | {"failed": said})
        return Outcome(piece.name, "failed", said)

    def _described(self, piece: Piece) -> Record:
        record: Record = {
            "piece": piece.name, "what": piece.what, "sizes": piece.told(self._request.sizes),
        }  # fmt: skip
        return record | ({"rehearsal": NO_CLAIM} if self._request.rehearsal else {})

    def _left_as_found(self, before: Usage) -> str:
        """Wait until nothing of a process is left on the card; what is, or nothing."""
        try:
            self._insist_left_as_found(before)
        except (PieceError, CardError) as error:
            return str(error)
        return ""

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
    """A piece's end, and its limits: each of a few, or how many hold and what does not."""
    checks = outcome.record["checks"] if outcome.record else []
    told = [
        f"{c['check']} {_shown(c['value'])} (limit {c['limit']:g}) {c['verdict']}" for c in checks
    ]
    if len(checks) > FEW_CHECKS:
        verdicts = [check["verdict"] for check in checks]
        counts = [f"{verdicts.count(kind)} {kind}" for kind in dict.fromkeys(sorted(verdicts))]
        failed = [line for line, kind in zip(told, verdicts, strict=True) if kind == "FAILS"]
        told = [", ".join(counts), *failed]
    return "; ".join([f"{outcome.piece:<8} {outcome.state}: {outcome.said}", *told])


def _told(check: Check) -> str:
    value = _shown(check["value"])
    return f"{check['check']} {value} (limit {check['limit']:g}) {check['verdict']}"


def _shown(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


def summary(outcomes: Iterable[Outcome]) -> str:
    """How many pieces came to what."""
    states = [outcome.state for outcome in outcomes]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    again = "; run it again for what is left" if "left" in states else ""
    return f"{len(states)} pieces: {counted}{again}"
