"""Versions of a vLLM engine's tokens: 0.32 sends them with every batch of outputs, 0.25 does not.

For 0.25 this process counts itself:

    engine core   tokens of a │ paused │ commit, `activate(v)` │ resumed │ tokens of v
    output queue  ────── a ───┤                                          ├────── v ──────

Outputs and answers come through one socket in order, and the engine answers a pause once no step is
in flight: outputs put into the queue before `activate` were sampled under the old version, later
ones under the new one. The time at which an output is taken out of the queue proves nothing, so
tokens are counted when they are put in.
"""

import weakref
from collections.abc import Sequence
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

from vllm.v1.engine.output_processor import RequestState

from rose.replica.token_versions import UNNAMED, Start

_ENGINE_SAYS: Final = hasattr(RequestState, "track_weight_version")


class Stamps(Protocol):
    """Versions of one engine's tokens."""

    def starts(self, collector: Any) -> Sequence[Start] | None:  # noqa: ANN401 -- vLLM's collector
        """Return (version, first output token) of a request, a list that grows while it runs.

        None if the request has ended already and its last output has them.
        """

    async def activate(self, version: int) -> None:
        """Stamp tokens with this version from here on. Only under the engine's pause."""


class EngineStamps:
    """Versions that the engine sends."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 -- vLLM's AsyncLLM
        # `_of_engines` keeps this for as long as there is the engine, and must not keep the engine.
        self._engine = weakref.proxy(engine)

    def starts(self, collector: Any) -> Sequence[Start] | None:  # noqa: ANN401 -- see Stamps
        state = self._engine.output_processor.request_states.get(collector.request_id)
        found: Sequence[Start] | None = None if state is None else state.weight_version_starts
        return found

    async def activate(self, version: int) -> None:
        await self._engine.update_weight_version(str(version))


class CountedStamps:
    """Versions counted at the queue of an engine that sends none."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 -- vLLM's AsyncLLM
        """Make it before the first request."""
        self._states = engine.output_processor.request_states
        self._version = UNNAMED
        self._tokens: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._starts: WeakKeyDictionary[Any, list[Start]] = WeakKeyDictionary()
        queue = engine.engine_core.outputs_queue
        self._put = queue.put_nowait
        queue.put_nowait = self._count_and_put

    def __len__(self) -> int:
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
    """Return the stamps of an engine, always the same object."""
    stamps = _of_engines.get(engine)
    if stamps is None:
        stamps = EngineStamps(engine) if _ENGINE_SAYS else CountedStamps(engine)
        _of_engines[engine] = stamps
    return stamps
