"""Runner of the pieces in order: each is measured, kept, left for later, or fails with a reason.

PIECE.json          the last measurement, written whole
PIECE.failed.json   the reason for a failure, until the piece is measured
"""

import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from bench.gpu.machine import MachineWatch, environment, insist_alone, insist_room
from bench.gpu.measure import Answered, Measure, PieceOrder
from bench.gpu.pieces import MOST_S, GpuPiece, Sizes
from rose.errors import ConfigError
from rose.nvml import Card, CardError, CardReader, Usage

Record = dict[str, Any]
State = Literal["done", "kept", "failed", "lacking", "left"]
Say = Callable[[str], None]
KEYS = {"piece", "sizes", "environment", "measured", "checks"}
# A driver takes memory back a moment after its process has ended.
SETTLED_S, SETTLED_BYTES, POLL_S = 10.0, 64 << 20, 0.1
FEW_CHECKS = 3
NO_CLAIM = "a rehearsal on CPUs with tiny models: no figure in here says anything about a GPU"


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Request for measurements. budget_s: no piece begins that is not expected to end within it.

    named: the pieces were named, so one that cannot run has failed.
    rehearsal: figures mean nothing and no limit can fail.
    """

    pieces: tuple[GpuPiece, ...]
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
    """Outcome of a piece; `record` of its measurement, now or before."""

    piece: str
    state: State
    said: str = ""
    record: Record | None = None

    @property
    def good(self) -> bool:
        """True if neither the piece nor one of its limits failed."""
        checks = self.record["checks"] if self.record and "rehearsal" not in self.record else ()
        return self.state != "failed" and all(check["verdict"] != "FAILS" for check in checks)


class Runner:
    """Runner on one card, which no other process uses."""

    def __init__(
        self, reader: CardReader, card: Card, request: RunRequest, measure: Measure
    ) -> None:
        self._reader = reader
        self._card = card
        self._request = request
        self._measure = measure
        self._folder = folder_of(request.out, card.name)
        self._began_s = time.monotonic()

    def insist_room(self, usage: Usage) -> None:
        """Raise CardError when a piece that is going to run would not fit."""
        waiting = [piece for piece in self._request.pieces if self._settled(piece) is None]
        self._insist_room(usage, sorted(waiting, key=self._bytes, reverse=True)[:1])

    def run(self, say: Say) -> list[Outcome]:
        """Measure all pieces, and return their outcomes."""
        outcomes = []
        for outcome in self._outcomes(say):
            say(line_of(outcome))
            outcomes.append(outcome)
        return outcomes

    def _outcomes(self, say: Say) -> Iterator[Outcome]:
        sizes, over = self._request.sizes, False
        waiting = list(self._request.pieces)
        while waiting:
            piece = waiting[0]
            outcome = self._settled(piece)
            if outcome is None and (over := over or piece.takes_s(sizes) > self._left_s):
                outcome = Outcome(piece.name, "left", "does not fit in what is left of the budget")
            if outcome is not None:
                yield outcome
                waiting.remove(piece)
                continue
            together = [one for one in waiting if self._goes_with(piece, one)]
            for one in together:
                say(f"{one.name:<8} {one.what}: about {one.takes_s(sizes):.0f} s")
            for outcome in self._measured(together):
                yield outcome
                waiting = [other for other in waiting if other.name != outcome.piece]

    def _goes_with(self, first: GpuPiece, piece: GpuPiece) -> bool:
        """Return True if the piece can share the first one's process and engines.

        A rehearsal makes its tiny weights in no time.
        """
        if piece is first or not first.served:
            return piece is first
        alike = self._request.rehearsal or piece.known_weights == first.known_weights
        return piece.served and alike and self._settled(piece) is None

    def _settled(self, piece: GpuPiece) -> Outcome | None:
        """Return an outcome that needs no card, None when the piece is to be measured."""
        request = self._request
        if missing := piece.missing():
            return Outcome(piece.name, "failed" if request.named else "lacking", missing)
        record = read_done(self._folder, piece.name) if request.resume else None
        if (
            record is not None
            and record["environment"]["commit"] == request.revision
            and record["sizes"] == piece.told(request.sizes)
        ):
            return Outcome(piece.name, "kept", "measured before with this commit", record)
        return None

    @property
    def _left_s(self) -> float:
        budget_s = self._request.budget_s
        return math.inf if budget_s is None else self._began_s + budget_s - time.monotonic()

    def _bytes(self, piece: GpuPiece) -> int:
        return piece.memory(self._request.sizes)

    def _insist_room(self, usage: Usage, pieces: Iterable[GpuPiece]) -> None:
        for piece in pieces:
            insist_room(self._card, usage, self._bytes(piece), piece.name)

    def _measured(self, pieces: list[GpuPiece]) -> Iterator[Outcome]:
        """Yield the outcome of each piece that the process began, at least of the first.

        A shared process may be ended from outside, so each piece's result is written at once.
        """
        request, first = self._request, pieces[0]
        try:
            before = self._reader.usage(self._card)
            facts = environment(self._card, before, request.revision)
            insist_alone(self._card, before)
            self._insist_room(before, pieces)
        except CardError as error:
            yield self._kept(Answered(first, failed=str(error)), {})
            return
        seconds = min(MOST_S, self._left_s) if first.served else first.limit_s
        order = PieceOrder(
            tuple(pieces), request.sizes, self._card, seconds, request.logs, self._folder
        )
        found: list[tuple[Answered, Record]] = []
        with MachineWatch(self._reader, self._card) as watch:
            began_s = time.monotonic()
            for answer in self._measure(order):
                record: Record = {"took_s": time.monotonic() - began_s, "environment": facts}
                found.append((answer, record))
                if len(pieces) > 1 and not answer.failed:
                    self._kept(answer, record | {"during": watch.summary()})
        left = self._left_on_card(before)
        for answer, record in found:
            yield self._kept(answer, record | {"during": watch.summary()}, left)

    def _kept(self, answer: Answered, record: Record, left: str = "") -> Outcome:
        """Write a measurement or a failure; `left` names what stayed on the card."""
        piece, request = answer.piece, self._request
        described: Record = {
            "piece": piece.name,
            "what": piece.what,
            "sizes": piece.told(request.sizes),
        }
        record = described | ({"rehearsal": NO_CLAIM} if request.rehearsal else {}) | record
        if failed := "; then ".join(filter(None, [answer.failed, left])):
            _write(_failed(self._folder, piece.name), record | {"failed": failed})
            return Outcome(piece.name, "failed", failed)
        assert answer.measured is not None
        checks = [asdict(check) for check in piece.checks(answer.measured)]
        record |= {"measured": answer.measured, "checks": checks}
        path = write_done(self._folder, record)
        return Outcome(piece.name, "done", f"{record['took_s']:.0f} s, {path}", record)

    def _left_on_card(self, before: Usage) -> str:
        """Wait until the card is as it was found; return what is left on it, or nothing."""
        deadline_s = time.monotonic() + SETTLED_S
        while True:
            try:
                now = self._reader.usage(self._card)
            except CardError as error:
                return str(error)
            kept_bytes = now.used_bytes - before.used_bytes
            if not now.processes and kept_bytes <= SETTLED_BYTES:
                return ""
            if time.monotonic() >= deadline_s:
                return (
                    f"the card is not as it was found: {max(0, kept_bytes) >> 20} MiB more in use,"
                    f" processes {list(now.processes)}; end what is left of the piece"
                )
            time.sleep(POLL_S)


def folder_of(out: Path, card_name: str) -> Path:
    """Return the folder of a card's results: `nvidia-h200` for `NVIDIA H200`."""
    return out / (re.sub(r"[^a-z0-9]+", "-", card_name.lower()).strip("-") or "gpu")


def write_done(folder: Path, record: Record) -> Path:
    """Replace the last measurement."""
    path = folder / f"{record['piece']}.json"
    _write(path, record)
    _failed(folder, record["piece"]).unlink(missing_ok=True)
    return path


def read_done(folder: Path, piece: str) -> Record | None:
    """Return the last measured record, None without one. Raises ConfigError when damaged."""
    path = folder / f"{piece}.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); see --out") from error
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); delete it") from error
    if not isinstance(record, dict) or not record.keys() >= KEYS or record["piece"] != piece:
        raise ConfigError(f"{path} is no record of {piece}; delete it")
    return record


def _failed(folder: Path, piece: str) -> Path:
    return folder / f"{piece}.failed.json"


def _write(path: Path, record: Record) -> None:
    """Replace the file as a whole: a machine that is taken away leaves the last one."""
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("w", encoding="utf-8") as file:
            file.write(json.dumps(record, indent=1, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        with suppress(OSError):
            beside.unlink()
        raise ConfigError(f"{path} cannot be written ({error.strerror}); see --out") from error


def line_of(outcome: Outcome) -> str:
    """Return the outcome as one line with its limits; of many limits only those that fail."""
    checks = outcome.record["checks"] if outcome.record else []
    told = {
        f"{c['name']} {'unknown' if c['value'] is None else format(c['value'], '.3g')}"
        f" (limit {c['limit']:g}) {c['verdict']}": c["verdict"]
        for c in checks
    }
    shown = list(told)
    if len(checks) > FEW_CHECKS:
        counts = Counter(sorted(check["verdict"] for check in checks))
        counted = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        shown = [counted, *(line for line, verdict in told.items() if verdict == "FAILS")]
    return "; ".join([f"{outcome.piece:<8} {outcome.state}: {outcome.said}", *shown])


def summary(outcomes: Iterable[Outcome]) -> str:
    """Count the outcomes."""
    states = Counter(outcome.state for outcome in outcomes)
    counted = ", ".join(f"{count} {state}" for state, count in states.items())
    again = "; run it again for what is left" if states["left"] else ""
    return f"{states.total()} pieces: {counted}{again}"
