"""The control `drop-token`: a journal that loses a token where a turn moved to another replica."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from rose.client import Sampling, Turn
from rose.demo.rollouts import TurnSource

T = TypeVar("T")


class LossyJournal:
    """A turn source that forgets the last token before each first move of a turn.

    What follows was generated after that token, and is now told without it. Every list has the
    right length, so only scoring the tokens again can notice.
    """

    def __init__(self, source: TurnSource) -> None:
        self._source = source

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str,
        min_version: int | None = None,
    ) -> Turn:
        """Generate one turn. Raises RolloutError when that is impossible."""
        turn = await self._source.generate(
            token_ids,
            sampling,
            request_id=request_id,
            session_id=session_id,
            min_version=min_version,
        )
        return without_the_token_at_the_seam(turn)


def without_the_token_at_the_seam(turn: Turn) -> Turn:
    """The turn without the last token of its first segment; as it is when it did not move."""
    if len(turn.segments) < 2:
        return turn
    lost = turn.segments[0][3] - 1
    return replace(
        turn,
        token_ids=_without(turn.token_ids, lost),
        logprobs=_without(turn.logprobs, lost),
        versions=tuple(
            (version, start - (start > lost), end - (end > lost))
            for version, start, end in turn.versions
        ),
        segments=tuple(
            (replica, kind, start - (start > lost), end - (end > lost))
            for replica, kind, start, end in turn.segments
        ),
    )


def _without(values: Sequence[T], index: int) -> tuple[T, ...]:
    return (*values[:index], *values[index + 1 :])
