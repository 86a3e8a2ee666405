"""Trajectories, found again by their tokens: verl gives each turn an id of its own.

A turn whose prompt begins with everything that an earlier one ended with goes on with its
trajectory, and is sent to the replica that has its prefix. Prompts are hashed in blocks, a chain of
them; what is left over is compared. A wrong guess costs a prefix that is computed again.
"""

import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence

BLOCK = 16
# Of turns that ended: what an agent loop has under way, several times over.
MOST = 65_536
_Key = tuple[int, tuple[int, ...]]


class Trajectories:
    """Sessions by the tokens that they ended with; the oldest are forgotten."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._ended: OrderedDict[_Key, str] = OrderedDict()
        # Lengths of what is left over, for each chain: most have one.
        self._rests: dict[int, list[int]] = {}

    def session_of(self, prompt: Sequence[int]) -> str:
        """The session that goes on with this prompt, or a new one."""
        for chain, at in reversed([*_chains(prompt)]):
            for length in sorted(self._rests.get(chain, ()), reverse=True):
                key = chain, tuple(prompt[at : at + length])
                if session := self._ended.get(key):
                    return session
        return uuid.uuid4().hex

    def ended(self, session: str, tokens: Sequence[int]) -> None:
        """A turn of the session ended, and these are all of its tokens, prompt included."""
        chain, at = [*_chains(tokens)][-1]
        key = chain, tuple(tokens[at:])
        if key not in self._ended:
            self._rests.setdefault(chain, []).append(len(key[1]))
        self._ended[key] = session
        self._ended.move_to_end(key)
        if len(self._ended) > self._most:
            self._forget(self._ended.popitem(last=False)[0])

    def _forget(self, key: _Key) -> None:
        lengths = self._rests[key[0]]
        lengths.remove(len(key[1]))
        if not lengths:
            del self._rests[key[0]]


def _chains(tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The hash of each whole number of blocks that it begins with, and their tokens, none first."""
    chain = 0
    yield chain, 0
    for at in range(BLOCK, len(tokens) + 1, BLOCK):
        chain = hash((chain, *tokens[at - BLOCK : at]))
        yield chain, at
