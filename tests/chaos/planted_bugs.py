"""Planted bugs: what the invariants are worth. Each breaks one rule of the product.

`FIRST_SEED`: the first seed that finds each; a test looks near it, a nightly one from 0 on.
"""

from typing import Final

FIRST_SEED: Final = {
    "no fencing": 0,
    "stop not read": 1,
    "epochs not read": 11,
    "grants before the epoch is durable": 0,
    "answers before it is durable": 0,
    "tells a version before it is durable": 0,
    "acts when it may not lead": 20,
    "adopts any epoch": 15,
    "a lost re-list after compaction": 3,
    "asks one scheduler only": 1,
    "a lease lives for ever": 0,
    "staleAfter ignored": 0,
    "a pause counts for nothing": 14,
    "reads on after a stall": 14,
    "a release is not obeyed": 0,
    "a stop leaves its guest": 0,
    "takes chunks of an old attempt": 0,
    "delivers again": 0,
    "takes weights of an old lease": 20,
}
MOST_SEEDS: Final = 500
# Looked for in worlds without a fault: others hide for some seconds who did not hear of a stop.
CALM: Final = frozenset({"a lost re-list after compaction"})
