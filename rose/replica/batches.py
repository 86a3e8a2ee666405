"""Batches: turns of one request. Each is a turn like any other, and their lines share the answer.

    BatchBody ──► turn 0 ──┐
                  turn 1 ──┤ lines of one step of the event loop ──► one piece of the answer
                  …      ──┘
    LeaveBody ──► those turns end, the others continue; a client that hangs up ends all of them

For a trainer's short turns the engine's server would otherwise spend more on requests and pieces
than on tokens.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from starlette.types import Receive, Send

from rose.contract.replica import BatchLine, StreamLine
from rose.replica.asgi import ClientGoneError
from rose.replica.engine import RequestRefusedError
from rose.replica.turns import ReplicaTurn, Turns, stream

_LOG = logging.getLogger("vllm.rose.replica")


class _Answer:
    """Queue of lines that the turns of one batch have produced; `left`: number of turns that are
    not over.
    """

    def __init__(self, turns: int) -> None:
        self.left = turns
        self._lines: list[BatchLine] = []
        self._news = asyncio.Event()

    def add(self, lines: Sequence[BatchLine]) -> None:
        if lines:
            self._lines += lines
            self._news.set()

    def over(self) -> None:
        """Count one turn of the batch as over, and wake the reader."""
        self.left -= 1
        self._news.set()

    async def next(self) -> list[BatchLine]:
        """Return and remove all queued lines, after waiting for some; an empty list if the last
        turns ended without a line.
        """
        await self._news.wait()
        self._news.clear()
        lines, self._lines = self._lines, []
        return lines


class TurnBatches:
    """Batches that are being answered, by the names that their clients gave them."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Turns, Mapping[int, ReplicaTurn]]] = {}

    def leave(self, name: str, places: Sequence[int]) -> None:
        """Cancel the turns at these places of a batch; unknown and ended ones are ignored."""
        found = self._open.get(name)
        if found is not None:
            served, turns = found
            served.leave([turns[place] for place in places if place in turns])

    async def serve(
        self,
        served: Turns,
        name: str,
        turns: Mapping[int, ReplicaTurn],
        refused: Sequence[BatchLine],
        receive: Receive,
        send: Send,
    ) -> None:
        """Run opened turns, given by their place in the batch, and stream the lines of all of them
        in one response; `refused` lines come first. All turns are cancelled if the client
        disconnects.
        """
        answer = _Answer(len(turns))
        answer.add(refused)
        this = self._open[name] = served, turns
        tasks = [asyncio.create_task(_run(served, answer, *each)) for each in turns.items()]
        try:
            with served.watched(turns.values(), receive):
                await stream(answer.next, lambda: not answer.left, send)
        finally:
            if self._open.get(name) is this:
                del self._open[name]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _run(served: Turns, answer: _Answer, place: int, turn: ReplicaTurn) -> None:
    """Run one turn to its end and queue its lines; an error becomes its last line."""
    try:
        await served.begin(turn)
        while not turn.ended:
            lines = await turn.next_lines()
            answer.add([BatchLine(place, line) for line in lines])
    except RequestRefusedError as error:
        answer.add([BatchLine(place, StreamLine(message=str(error)), error.status)])
    except ClientGoneError:
        # The client is gone; the turn is closed below.
        return
    except Exception as error:  # noqa: BLE001 -- the others go on
        _LOG.exception("a turn of a batch failed")
        said = f"{type(error).__name__}: {error}"
        answer.add([BatchLine(place, StreamLine(finish_reason="error", message=said))])
    finally:
        answer.over()
        await served.close(turn)
