"""Promises that every engine's adapter keeps, by side; who runs what, and against which engine, is
in the tests that name them (`pytest.mark.promise`).

Nothing here imports an engine: `scripts/contract-table` makes docs/engines.md of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rose.engines.capabilities import Capability


class Side(StrEnum):
    """What an engine is while it keeps a promise."""

    HOST = "host"
    GUEST = "guest"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Promise:
    """One sentence that holds of every engine, unless it lacks what the promise needs."""

    id: str
    side: Side
    says: str
    needs: Capability | None = None


def _of(side: Side, *promises: tuple[str, str] | tuple[str, str, Capability]) -> list[Promise]:
    return [Promise(f"{side}.{name}", side, says, *needs) for name, says, *needs in promises]


HOST: Sequence[Promise] = _of(
    Side.HOST,
    ("busy", "says that it is busy before the first step of the first request"),
    ("idle", "says that it is idle once its last request is done, and only then"),
    ("deadlines", "says when the next first token and the next token after one are due"),
    ("beats", "lets nobody wait for a sign of life, however idle it is"),
    ("latencies", "says TTFT and time between tokens of each finished request"),
    ("exact", "generates, token for token in fp32, what the stock engine does"),
    ("bad-page", "serves as the stock engine does when its page cannot be used"),
    ("second", "keeps guests away while another engine is on its page unseen"),
    ("leaves", "is no host any more as soon as its process has ended"),
    (
        "node",
        "is read by a node daemon: it grants while the host is idle, and freezes while not",
    ),
    (
        "lends",
        "lends idle KV memory, measured, and has it back for the request that needs it",
        Capability.LEND_HOST_MEMORY,
    ),
    ("refuses", "says in one line what it cannot be a host with, and serves on without ROSE"),
)
"""Of a production engine with ROSE's plugin."""

GUEST: Sequence[Promise] = ()
"""Of a rollout engine beside a host."""

WEIGHTS: Sequence[Promise] = ()
"""Of a replica that takes new versions."""

PROMISES: Sequence[Promise] = (*HOST, *GUEST, *WEIGHTS)
