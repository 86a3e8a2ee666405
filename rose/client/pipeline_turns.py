"""The turns of one episode of a pipeline: fenced by a version going out, stamped coming in."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, Unpack

from elastic_scheduler import GroupFeed, SampleRun, TurnTicket
from rose.client.errors import AnswerBroken, TurnCancelled, VersionNotServed
from rose.client.options import TurnOptions
from rose.client.session import TurnSource
from rose.client.stream import ChunkSink, TurnStream
from rose.client.turn import Sampling, TokenChunk, Turn

P = TypeVar("P")
T = TypeVar("T")


class PipelineTurns(Generic[P, T]):
    """A `TurnSource` for one run. After the run became void, every turn is a TurnCancelled."""

    def __init__(
        self,
        source: TurnSource,
        feed: GroupFeed[P, T],
        run: SampleRun,
        every: TurnOptions,
        changed: Callable[[], None],
    ) -> None:
        """`every` turn has these options; `changed` is called when a stamp made groups void."""
        self._source = source
        self._feed = feed
        self._run = run
        self._every = every
        self._changed = changed

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
    ) -> Turn:
        """As `RolloutClient.generate`; the answer counts for the age of its group."""
        ticket = self._begin()
        try:
            fenced = self._fenced(options, ticket)
            turn = await self._source.generate(token_ids, sampling, **fenced)
            if turn.token_ids:
                self._stamp(ticket, _oldest_version(turn))
        finally:
            self._feed.end_turn(self._run, ticket.number)
        return turn

    def stream(
        self, token_ids: Sequence[int], sampling: Sampling, **options: Unpack[TurnOptions]
    ) -> TurnStream:
        """As `RolloutClient.stream`; chunks count as they come."""

        async def run(sink: ChunkSink) -> Turn:
            ticket = self._begin()

            async def stamped(chunk: TokenChunk) -> None:
                if chunk.token_ids:
                    kept = chunk.oldest_version
                    self._stamp(ticket, chunk.version if kept is None else kept)
                await sink(chunk)

            try:
                fenced = self._fenced(options, ticket)
                return await self._source.stream(token_ids, sampling, **fenced).into(stamped)
            finally:
                self._feed.end_turn(self._run, ticket.number)

        return TurnStream(run)

    def _begin(self) -> TurnTicket:
        ticket = self._feed.begin_turn(self._run)
        if ticket is None:
            raise TurnCancelled(f"the group of {self._run.name} is void: it starts anew")
        return ticket

    def _fenced(self, options: TurnOptions, ticket: TurnTicket) -> TurnOptions:
        """The options, with the oldest version that is still of use."""
        exact = options.get("exact_version")
        if exact is None:
            newest = max(ticket.min_version, options.get("min_version") or 0)
            return {**self._every, **options, "min_version": newest}
        if exact < ticket.min_version:
            raise VersionNotServed(
                f"exact_version {exact} would be too old to be trained on:"
                f" {ticket.min_version} is the oldest that is not"
            )
        return {**self._every, **options}

    def _stamp(self, ticket: TurnTicket, version: int) -> None:
        if version < ticket.min_version:
            said = f"version {version}" if version >= 0 else "no version"
            raise AnswerBroken(
                f"tokens of {said} came though {ticket.min_version} or newer was asked for:"
                " use gateways and replicas of ROSE where staleness is bounded"
            )
        alive = self._feed.stamp(self._run, ticket.number, version)
        if not alive:
            self._changed()
            raise TurnCancelled(f"the group of {self._run.name} aged out: it starts anew")


def _oldest_version(turn: Turn) -> int:
    """Of a turn with tokens and the KV behind them; -1 when some tokens have no version."""
    stamped = sum(end - start for _, start, end in turn.versions)
    oldest = turn.oldest_version
    return -1 if oldest is None or stamped < len(turn.token_ids) else oldest
