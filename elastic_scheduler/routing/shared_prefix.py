"""Shared prefixes: where turns go whose callers name no trajectory, by their first tokens alone.

A trajectory's next prompt begins with its last one. So of each turn some of its prefixes are
remembered as hashes, and a new prompt is looked up by its own, the longest first:

    prompt    |--64--|--64--|--64--|--64--|--…        a key for each block: of all tokens so far
    noted     1, 2, 4, 8, … blocks and the last four  so that one which diverges is found too
    found     the longest that is noted, if it is at least half of the prompt

A key says which tokens, in 64 bits: a collision costs a turn a prefill, never a wrong token.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from elastic_scheduler.routing.predictors import Prefix

BLOCK_TOKENS = 64
_BLOCK_BYTES = 4 * BLOCK_TOKENS
# What is shorter is computed as fast as it is looked for.
LEAST_BLOCKS = 2
# A longer prompt is known by its beginning.
MOST_BLOCKS = 1_024
LAST_BLOCKS = 4
PREFIXES_KEPT = 65_536
HOLDERS_KEPT = 4


def prefix_keys(token_ids: Sequence[int], salt: str) -> tuple[int, ...]:
    """Keys of a prompt's whole blocks of `BLOCK_TOKENS`; none of a short one.

    Those of equal tokens under another salt are others, as their cached blocks are.
    """
    blocks = min(len(token_ids) // BLOCK_TOKENS, MOST_BLOCKS)
    if blocks < LEAST_BLOCKS:
        return ()
    data = array("I", token_ids[: blocks * BLOCK_TOKENS]).tobytes()
    key, keys = hash(salt), []
    for start in range(0, len(data), _BLOCK_BYTES):
        key = hash((key, data[start : start + _BLOCK_BYTES]))
        keys.append(key)
    return tuple(keys)


class SharedPrefix(NamedTuple):
    """Length of a prefix that replicas were given lately, and which ones, the last one first."""

    tokens: int
    holders: tuple[Prefix, ...]


NOWHERE = SharedPrefix(0, ())


class SharedPrefixes:
    """The newest prefixes and their holders; each costs about 200 bytes."""

    def __init__(self, kept: int = PREFIXES_KEPT) -> None:
        self._kept = kept
        self._holders: OrderedDict[int, tuple[Prefix, ...]] = OrderedDict()

    def __len__(self) -> int:
        """Prefixes that are remembered."""
        return len(self._holders)

    def find(self, keys: Sequence[int]) -> SharedPrefix:
        """The longest known prefix, at least half of the prompt that the keys are of."""
        for blocks in range(len(keys), max(LEAST_BLOCKS, len(keys) // 2) - 1, -1):
            holders = self._holders.get(keys[blocks - 1])
            if holders is not None:
                return SharedPrefix(blocks * BLOCK_TOKENS, holders)
        return NOWHERE

    def note(self, keys: Sequence[int], replica: str, version: int) -> None:
        """A turn with this prompt ran on a replica, under a policy version."""
        blocks = len(keys)
        noted = {*range(max(LEAST_BLOCKS, blocks - LAST_BLOCKS + 1), blocks + 1)}
        length = LEAST_BLOCKS
        while length < blocks:
            noted.add(length)
            length *= 2
        for count in noted:
            key = keys[count - 1]
            held = Prefix(replica, count * BLOCK_TOKENS, version)
            others = [each for each in self._holders.get(key, ()) if each.replica != replica]
            self._holders[key] = (held, *others[: HOLDERS_KEPT - 1])
            self._holders.move_to_end(key)
        while len(self._holders) > self._kept:
            self._holders.popitem(last=False)
