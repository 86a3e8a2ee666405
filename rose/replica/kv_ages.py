"""How old the KV is that a token was sampled on, in policy versions.

A version that clears the caches leaves no older KV. One that keeps them leaves whatever running
turns have; what began under it shares no cached prefix with what began before, by its salt.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final

REMEMBERED: Final = 256


@dataclass(frozen=True, slots=True)
class _Activation:
    version: int
    kept_kv: bool


class KvAges:
    """The activations of one engine, newest last."""

    def __init__(self) -> None:
        self._past = deque([_Activation(0, kept_kv=False)], maxlen=REMEMBERED)

    @property
    def current(self) -> int:
        """The active version: what turns that start now begin under."""
        return self._past[-1].version

    def activated(self, version: int, *, kept_kv: bool) -> None:
        """Note that `version` is active from now on."""
        self._past.append(_Activation(version, kept_kv))

    def oldest(self, began: int, version: int) -> int:
        """The oldest version whose KV a token of `version` may have been sampled on.

        `began` is the version that its turn began under. A turn that was preempted meanwhile has
        younger KV than this says, never older.
        """
        oldest = version
        for activation in reversed(self._past):
            if activation.version > version:
                continue
            oldest = activation.version
            if not activation.kept_kv or oldest <= began:
                return min(oldest, version)
        # Older than what is remembered: as old as the turn.
        return min(began, version)

    def salted(self, salt: str | None) -> str | None:
        """The cache salt of a turn that begins now; its own where no KV was kept.

        A cached block belongs to the salt that its turn began with. So KV of an older version, or
        of two, is never found by a turn that began under a newer one.
        """
        if not self._past[-1].kept_kv:
            return salt
        return f"{self.current}/{salt or ''}"
