"""What a client is doing: the turns that run and counts of those that ended."""

import asyncio
from dataclasses import dataclass, field

from rose.client.turn import Ask


@dataclass(frozen=True, slots=True)
class TurnProgress:
    """A running turn. `tokens` are those received: streams only, whole answers come at the end.

    `tries` counts requests sent for it, the first one included.
    """

    request_id: str
    session_id: str
    gateway: str
    tokens: int
    tries: int
    age_s: float


@dataclass(frozen=True, slots=True)
class Progress:
    """A client since it was opened. `tokens` are those of finished turns."""

    running: tuple[TurnProgress, ...]
    finished: int
    failed: int
    cancelled: int
    repeated_tries: int
    tokens: int


@dataclass(slots=True, eq=False)
class RunningTurn:
    """One turn's row; whoever works on it keeps it true."""

    ask: Ask
    began_s: float
    task: "asyncio.Task[object] | None" = None
    gateway: str = ""
    tokens: int = 0
    tries: int = 0
    cancelled: bool = False

    def cancel(self) -> None:
        """End it: its waiter gets TurnCancelled."""
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()


@dataclass(slots=True)
class Ledger:
    """All turns of a client by request id."""

    running: dict[str, RunningTurn] = field(default_factory=dict)
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    repeated_tries: int = 0
    tokens: int = 0

    def close(self, row: RunningTurn, tokens: int | None) -> None:
        """A turn is over: `tokens` it has, None when it failed or was cancelled."""
        self.running.pop(row.ask.request_id, None)
        self.repeated_tries += max(0, row.tries - 1)
        if tokens is not None:
            self.finished += 1
            self.tokens += tokens
        elif row.cancelled:
            self.cancelled += 1
        else:
            self.failed += 1

    def snapshot(self, now_s: float) -> Progress:
        """As the caller may keep it."""
        rows = tuple(
            TurnProgress(
                row.ask.request_id,
                row.ask.session_id,
                row.gateway,
                row.tokens,
                row.tries,
                now_s - row.began_s,
            )
            for row in self.running.values()
        )
        return Progress(
            rows, self.finished, self.failed, self.cancelled, self.repeated_tries, self.tokens
        )
