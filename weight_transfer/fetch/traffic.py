"""Traffic: what one server of weights sent, and what its fetcher brought, counted since start."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

# A peer that asked within so long counts as a reader.
READER_S = 60.0
MOST_PEERS = 4_096


class Source(StrEnum):
    """Sender of chunks."""

    PUBLISHER = "publisher"
    NEIGHBOUR = "neighbour"


class Asked(StrEnum):
    """Kind of requested object."""

    CHUNK = "chunk"
    MANIFEST = "manifest"


class Answer(StrEnum):
    """Kind of reply."""

    SENT = "sent"
    IN_LINE = "in_line"
    ELSEWHERE = "elsewhere"
    MISSING = "missing"
    REFUSED = "refused"
    FAILED = "failed"


_ANSWERS = {
    202: Answer.IN_LINE,
    401: Answer.REFUSED,
    403: Answer.REFUSED,
    404: Answer.MISSING,
    409: Answer.ELSEWHERE,
}


def answer_of(status: int) -> Answer:
    """Return the kind of reply of an HTTP status."""
    return _ANSWERS.get(status) or (Answer.SENT if status < 400 else Answer.FAILED)


@dataclass(slots=True)
class Traffic:
    """Bytes are those of chunks, as they cross the link; `rejected` ones had another digest."""

    clock_s: Callable[[], float] = time.monotonic
    served_bytes: int = 0
    fetched_bytes: Counter[Source] = field(default_factory=Counter)
    failed_fetches: int = 0
    rejected_chunks: int = 0
    answers: Counter[tuple[Asked, Answer]] = field(default_factory=Counter)
    _peers: OrderedDict[str, float] = field(default_factory=OrderedDict)

    def fetched(self, size: int, *, from_publisher: bool) -> None:
        self.fetched_bytes[Source.PUBLISHER if from_publisher else Source.NEIGHBOUR] += size

    def answered(self, asked: Asked, status: int, peer: str) -> None:
        self.answers[asked, answer_of(status)] += 1
        self._peers[peer] = self.clock_s()
        self._peers.move_to_end(peer)
        if len(self._peers) > MOST_PEERS:
            self._peers.popitem(last=False)

    def readers(self) -> int:
        """Return the number of addresses that sent a request within READER_S."""
        oldest_s = self.clock_s() - READER_S
        while self._peers and next(iter(self._peers.values())) < oldest_s:
            self._peers.popitem(last=False)
        return len(self._peers)
