"""Planted bugs: what the invariants are worth. Each breaks one rule of a shell around the cores.

`FIRST_SEED`: the first seed that finds each; a test runs those.
"""

from typing import Final

FIRST_SEED: Final = {
    "no fencing": 5,
    "stop not read": 18,
    "epochs not read": 9,
    "grants before the epoch is durable": 0,
    "answers before it is durable": 0,
    "tells a version before it is durable": 0,
    "a lease lives for ever": 8,
    "a pause counts for nothing": 14,
    "takes chunks of an old attempt": 0,
    "delivers again": 0,
}
