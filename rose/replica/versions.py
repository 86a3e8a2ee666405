"""Which policy version sampled which token: cuts a run of output tokens where the version changes.

A version has a name, and at which output token each began is noted; see `stamps`.
"""

from collections.abc import Sequence

UNNAMED = "default"
"""What vLLM calls the weights that it started from."""

Start = tuple[str, int]
Span = tuple[int, int, int]


class UnknownVersionError(Exception):
    """The engine does not say which policy version sampled a token."""


def version_number(name: str) -> int:
    """The integer behind the engine's version string; an engine that was never updated runs 0."""
    if name == UNNAMED:
        return 0
    if not name.isdecimal():
        raise UnknownVersionError(
            f"the engine runs version {name!r}, which is no integer; restart it with its base model"
        )
    return int(name)


def split_spans(starts: Sequence[Start], first: int, count: int) -> list[Span]:
    """Cut output tokens [first, first + count): (version, begin, end), relative to `first`.

    `starts` holds (version name, first output token), in order. Raises UnknownVersionError for
    tokens before the first start: a token without its version is worth nothing to a trainer.
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
