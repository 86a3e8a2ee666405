"""Policy versions of output tokens: the version that sampled each token, and the age of its KV.

`Stamps` notes at which output token each version began; `split_spans` cuts a run of output tokens
there. Each engine's adapter knows which version sampled a token (`rose.replica.vllm`,
`rose.replica.sglang`).

`KvStaleness` is the age of the KV in policy versions. A version that clears the caches leaves no
older KV. One that keeps them leaves the KV of running turns; a turn that began under it shares no
cached prefix with turns that began before, by its salt.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

REMEMBERED: Final = 256


@dataclass(frozen=True, slots=True)
class _Activation:
    version: int
    kept_kv: bool


class KvStaleness:
    """History of an engine's version activations, from which it computes how old the KV of a token
    can be.
    """

    def __init__(self) -> None:
        self._past = deque([_Activation(0, kept_kv=False)], maxlen=REMEMBERED)

    @property
    def current(self) -> int:
        """Number of the active version, under which new turns begin."""
        return self._past[-1].version

    def activated(self, version: int, *, kept_kv: bool) -> None:
        """Record that `version` is active from now on; `kept_kv`: True if caches were not
        cleared.
        """
        self._past.append(_Activation(version, kept_kv))

    def oldest(self, began: int, version: int) -> int:
        """Return the oldest version whose KV a token of `version` may have been sampled on, in a
        turn that began under `began`.

        A preempted turn may have younger KV than this says, never older.
        """
        oldest = version
        for activation in reversed(self._past):
            if activation.version > version:
                continue
            oldest = activation.version
            if not activation.kept_kv or oldest <= began:
                return min(oldest, version)
        # The turn began under a forgotten version, and its KV is not older than that one.
        return min(began, version)

    def salted(self, salt: str | None) -> str | None:
        """Return the cache salt of a turn that begins now: its own, with the version before it if
        the last activation kept KV.

        A cached block belongs to the salt that its turn began with. So KV of an older version, or
        of two, is never reused by a turn that began under a newer one.
        """
        if not self._past[-1].kept_kv:
            return salt
        return f"{self.current}/{salt or ''}"


UNNAMED = "default"
"""Version string in vLLM and SGLang of the weights that they started from."""

Start = tuple[str, int]
Span = tuple[int, int, int]


class UnknownVersionError(Exception):
    """Error raised because the engine does not report which policy version sampled a token."""


def version_number(name: str) -> int:
    """Return the policy version that an engine's version string names, 0 for "default". Raises
    UnknownVersionError for anything else than digits.
    """
    if name == UNNAMED:
        return 0
    if not name.isdecimal():
        raise UnknownVersionError(
            f"the engine runs version {name!r}, which is no integer; restart it with its base model"
        )
    return int(name)


def split_spans(starts: Sequence[Start], first: int, count: int) -> list[Span]:
    """Return the output tokens [first, first + count) as spans (version, begin, end) of one version
    each; begin and end are relative to `first`.

    starts: (version name, first output token), in order. Raises UnknownVersionError for tokens
    before the first start.
    """
    if not starts or starts[0][1] > first:
        raise UnknownVersionError(f"no version is known for output token {first}")
    if starts[-1][1] <= first:
        return [(version_number(starts[-1][0]), 0, count)]
    last = first + count
    ends = [start for _, start in starts[1:]] + [last]
    spans = []
    for (name, begin), end in zip(starts, ends, strict=True):
        low, high = max(begin, first), min(end, last)
        if low < high:
            spans.append((version_number(name), low - first, high - first))
    return spans
