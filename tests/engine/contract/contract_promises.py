"""Promises that every engine's adapter keeps, by side; who runs what, and against which engine, is
in the tests that name them (`pytest.mark.promise`).

Nothing here imports an engine: `scripts/contract-table` makes docs/engines.md of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rose.engines.spec import Capability


class Side(StrEnum):
    """Role of an engine while it keeps a promise."""

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
"""A production engine with ROSE's plugin."""

GUEST: Sequence[Promise] = _of(
    Side.GUEST,
    ("warm", "runs every size of step before its first lease, and counts none of its tokens"),
    ("gate", "runs no step without leave, and says why"),
    ("tokens", "has at most the granted tokens in each step, a prompt's chunks included"),
    ("sequences", "takes no more sequences than are granted"),
    ("freeze", "stops within one step, and goes on where it was, token for token in fp32"),
    ("drain", "hands tokens back at once, frozen too; elsewhere a turn goes on token for token"),
    ("priority", "runs turns of a lower priority number first"),
    ("stop", "samples as it is asked: its own stops, allowed tokens alone, logprobs of the same"),
    ("likely", "gives the likeliest tokens of a turn, joined where it moved, and of a prompt"),
    (
        "balloon",
        "gives KV memory back, measured, prefixes first; retracted turns lose no token",
        Capability.RETURN_HOST_MEMORY,
    ),
    (
        "idle-memory",
        "gives KV memory back while it is idle",
        Capability.RETURN_HOST_MEMORY,
    ),
    ("node", "is started, leased, frozen, ballooned, updated and ended by a node daemon"),
    ("orphan", "ends itself when nobody grants for too long"),
    ("refuses", "does not start, and says in one line, with what breaks a promise"),
)
"""A rollout engine beside a host."""

WEIGHTS: Sequence[Promise] = _of(
    Side.WEIGHTS,
    ("update", "computes what a fresh load of the version computes, its logits bit for bit"),
    ("stamps", "says of each token which version sampled it, in turns that span several too"),
    ("keep", "keeps the KV of running turns on request, and says how old it is"),
    ("finish-old", "lets turns end under their version on request"),
    ("wrong-base", "refuses a version of another base, and serves on with what it has"),
    ("forged", "refuses a version that its trainer did not sign"),
    ("audit", "finds each live weight to be its version's"),
    ("frozen", "takes a version while it is frozen"),
)
"""A replica that takes new versions."""

PROMISES: Sequence[Promise] = (*HOST, *GUEST, *WEIGHTS)
