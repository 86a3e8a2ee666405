"""Trajectories by their tokens: verl gives each turn an id of its own.

A turn whose prompt begins with all tokens of an earlier turn belongs to its trajectory, and goes to
the replica that has its prefix. Prompts are hashed in blocks, a chain of them; the remainder is
compared. A wrong match costs a prefix that is computed again.
"""

import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence

BLOCK = 16
# Ended turns to remember: several times as many as an agent loop runs at once.
MOST = 65_536
_Key = tuple[int, tuple[int, ...]]


class Trajectories:
    """Sessions by the tokens that they ended with; the oldest are forgotten."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._ended: OrderedDict[_Key, str] = OrderedDict()
        # Lengths of the remainders for each chain: most have one.
        self._rests: dict[int, list[int]] = {}

    def session_of(self, prompt: Sequence[int]) -> str:
        """Return the session that continues with this prompt, or a new one."""
        for chain, at in reversed([*_chains(prompt)]):
            for length in sorted(self._rests.get(chain, ()), reverse=True):
                key = chain, tuple(prompt[at : at + length])
                if session := self._ended.get(key):
                    return session
        return uuid.uuid4().hex

    def ended(self, session: str, tokens: Sequence[int]) -> None:
        """Record all tokens of a session's ended turn, prompt included."""
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
    """Return the hash of each number of whole blocks, and their tokens, none first."""
    chain = 0
    yield chain, 0
    for at in range(BLOCK, len(tokens) + 1, BLOCK):
        chain = hash((chain, *tokens[at - BLOCK : at]))
        yield chain, at
