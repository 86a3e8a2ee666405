"""Which member of a cluster takes what over the slow link: rendezvous hashing.

Every member computes the same order from the names alone, and without one of them the order of the
others stays: what a dead member had not finished falls to the next one, and nothing else moves.
"""

from collections.abc import Iterable

import blake3


def order(members: Iterable[str], name: str) -> list[str]:
    """Members by how much `name` is theirs, the first one most; each member once."""
    return sorted(set(members), key=lambda member: _weight(member, name), reverse=True)


def _weight(member: str, name: str) -> bytes:
    digest: bytes = blake3.blake3(f"{member}\0{name}".encode()).digest()
    return digest
