"""Which policy version sampled which token: read from vLLM's own bookkeeping.

Every step's outputs carry the engine's weight version, and the output processor notes for each
request at which output token a version began. vLLM shows that list only when a request ends; a
request that is killed never ends, so we read it while it grows. Pinned to vLLM 0.32 by a test.
"""

from collections.abc import Sequence
from typing import Any

UNNAMED = "default"


def version_number(name: str) -> int:
    """The integer behind vLLM's version string; an engine that was never updated runs 0."""
    return 0 if name == UNNAMED else int(name)


class VersionStamps:
    """Spans of one request. Keep it from before the first token: the request's state goes away."""

    def __init__(self, output_processor: Any, request_id: str) -> None:  # noqa: ANN401 - vLLM's own
        internal = output_processor.external_req_ids.get(request_id) or [request_id]
        state = output_processor.request_states.get(internal[0])
        self._starts: list[tuple[str, int]] | None = state and state.weight_version_starts

    @property
    def known(self) -> bool:
        """Whether the request was found."""
        return self._starts is not None

    def split(self, first: int, count: int) -> list[tuple[int, int, int]]:
        """Cut output tokens [first, first + count): (version, begin, end), relative to first."""
        return split_spans(self._starts or [], first, count)


def split_spans(
    starts: Sequence[tuple[str, int]], first: int, count: int
) -> list[tuple[int, int, int]]:
    """Pure core of `VersionStamps.split`; tokens before the first start belong to version 0."""
    bounds = [(0, UNNAMED), *((start, name) for name, start in starts)]
    pieces = []
    for index, (begin, name) in enumerate(bounds):
        end = bounds[index + 1][0] if index + 1 < len(bounds) else first + count
        low, high = max(begin, first), min(end, first + count)
        if low < high:
            pieces.append((version_number(name), low - first, high - first))
    return pieces
