"""Policy versions of output tokens: which version sampled each token, on KV of which age.

`Stamps` notes at which output token each version began; `split_spans` cuts a run of output tokens
there. vLLM 0.32 gives the version with every batch of outputs. 0.25 does not; there this process
counts itself:

    engine core   tokens of a │ paused │ commit, `activate(v)` │ resumed │ tokens of v
    output queue  ────── a ───┤                                          ├────── v ──────

Outputs and answers come through one socket in order, and the engine answers a pause once no step
is in flight: outputs put into the queue before `activate` were sampled under the old version, later
ones under the new one. The time at which an output is taken out of the queue says nothing about it,
so tokens are counted where they are put in.

`KvStaleness` is the age of the KV in policy versions. A version that clears the caches leaves no
older KV. One that keeps them leaves the KV of running turns; a turn that began under it shares no
cached prefix with turns that began before, by its salt.
"""

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

from vllm.v1.engine.output_processor import RequestState

REMEMBERED: Final = 256


@dataclass(frozen=True, slots=True)
class _Activation:
    version: int
    kept_kv: bool


class KvStaleness:
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


_ENGINE_SAYS: Final = hasattr(RequestState, "track_weight_version")


class Stamps(Protocol):
    """Versions of one engine's tokens."""

    def starts(self, collector: Any) -> Sequence[Start] | None:  # noqa: ANN401 -- vLLM's collector
        """(version, first output token) of a request, a list that grows while it runs; None when
        the request has ended already and its last output says it."""
        ...

    async def activate(self, version: int) -> None:
        """From here on tokens are of this version. Only under the engine's pause."""
        ...


class EngineStamps:
    """What the engine says."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 -- vLLM's AsyncLLM
        # `_of_engines` keeps this for as long as there is the engine, and must not be why there is.
        self._engine = weakref.proxy(engine)

    def starts(self, collector: Any) -> Sequence[Start] | None:  # noqa: ANN401 -- see Stamps
        state = self._engine.output_processor.request_states.get(collector.request_id)
        found: Sequence[Start] | None = None if state is None else state.weight_version_starts
        return found

    async def activate(self, version: int) -> None:
        await self._engine.update_weight_version(str(version))


class CountedStamps:
    """What is counted at the queue of an engine that does not say."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 -- vLLM's AsyncLLM
        """Before the first request."""
        self._states = engine.output_processor.request_states
        self._version = UNNAMED
        self._tokens: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._starts: WeakKeyDictionary[Any, list[Start]] = WeakKeyDictionary()
        queue = engine.engine_core.outputs_queue
        self._put = queue.put_nowait
        queue.put_nowait = self._count_and_put

    def __len__(self) -> int:
        """Requests that anything is remembered of."""
        return len({*self._tokens, *self._starts})

    def starts(self, collector: Any) -> list[Start]:  # noqa: ANN401 -- see Stamps
        return self._starts.setdefault(collector, [])

    async def activate(self, version: int) -> None:
        self._version = str(version)

    def _count_and_put(self, outputs: Any) -> None:  # noqa: ANN401 -- EngineCoreOutputs or an error
        for output in getattr(outputs, "outputs", ()):
            state = self._states.get(output.request_id)
            if state is not None and output.new_token_ids:
                self._count(state.queue, len(output.new_token_ids))
        self._put(outputs)

    def _count(self, collector: Any, tokens: int) -> None:  # noqa: ANN401 -- vLLM's collector
        before = self._tokens.get(collector, 0)
        starts = self.starts(collector)
        if not starts or starts[-1][0] != self._version:
            starts.append((self._version, before))
        self._tokens[collector] = before + tokens


_of_engines: Final[WeakKeyDictionary[Any, Stamps]] = WeakKeyDictionary()


def stamps_of(engine: Any) -> Stamps:  # noqa: ANN401 -- vLLM's AsyncLLM
    """The stamps of an engine, always the same."""
    stamps = _of_engines.get(engine)
    if stamps is None:
        stamps = EngineStamps(engine) if _ENGINE_SAYS else CountedStamps(engine)
        _of_engines[engine] = stamps
    return stamps
