"""Interface between a replica and its engine.

`rose.replica.vllm` and `rose.replica.sglang` each implement it. Everything above them, turns,
leases, weight updates, warm-up, is the same for both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from rose.contract.replica import GenerateBody, StreamLine
from rose.replica.token_versions import KvStaleness
from rose.tracing import TraceContext


class RequestRefusedError(Exception):
    """The engine refuses a request; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New output since the last call; `finish_reason` is the engine's, None while it runs."""

    chunks: list[StreamLine]
    finish_reason: str | None


class EngineRequest(Protocol):
    """A registered request. Read it with `next` until it finishes, else abort it."""

    @property
    def tokens(self) -> int:
        """Output tokens so far."""

    async def next(self) -> OutputDelta:
        """Wait for output; output since the last call is merged.

        Raises UnknownVersionError, the engine's own failures, and the error of `interrupt`.
        """

    def interrupt(self, error: Exception) -> None:
        """Make `next` raise at once."""


WARM_UP_OUTPUT_TOKENS: Final = 3
# More rows take the same kernels: above this a prefill only takes longer.
MOST_WARM_UP_TOKENS: Final = 1024


@dataclass(frozen=True, slots=True)
class WarmUpSizes:
    """Largest batch that an engine may be asked for at once."""

    max_num_seqs: int
    max_model_len: int
    max_tokens: int
    vocabulary: int

    def batches(self) -> Iterator[tuple[int, int]]:
        """Return (sequences, prompt tokens of each): all doublings, short prompts and long ones."""
        longest = self.max_model_len - WARM_UP_OUTPUT_TOKENS
        for sequences in _doublings(self.max_num_seqs):
            fair = max(1, min(longest, self.max_tokens // sequences))
            for prompt in sorted({min(8, fair), min(64, fair), fair}):
                yield sequences, prompt


def _doublings(most: int) -> list[int]:
    sizes = [1]
    while sizes[-1] * 2 < most:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == most else [*sizes, most]


class ReplicaEngine(Protocol):
    """One engine in its API process; `model_dir` is the folder that it was started from."""

    model_dir: str

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """Errors that it raises when it is ending or has ended."""

    @property
    def updatable(self) -> bool:
        """True if its workers take weight updates."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that its KV cache has room for."""

    @property
    def sizes(self) -> WarmUpSizes:
        """Largest batch that it may be asked for at once."""

    async def start(
        self, body: GenerateBody, ages: KvStaleness, trace: TraceContext | None = None
    ) -> EngineRequest:
        """Start a turn. Raises RequestRefusedError."""

    async def abort(self, requests: Sequence[Any]) -> None:
        """End requests that it started, each with its last output before this awaits."""

    async def pause(self, *, clear_cache: bool) -> None:
        """Return once no step is in flight; requests stay and continue when it resumes.

        With `clear_cache` they compute all of their KV again.
        """

    async def resume(self) -> None:
        """Resume."""

    async def activate(self, version: int) -> None:
        """Stamp tokens with this version from here on. Only under the engine's pause."""

    async def call_all(self, method: str, *args: object) -> list[dict[str, Any]]:
        """Call a method of its weight workers; return each rank's answer. Raises their errors."""

    def meeting_place(self) -> str | None:
        """Return the folder of its ranks' shared copy of the checkpoint; None for one rank."""

    async def reset_prefix_cache(self) -> bool:
        """Drop all prefixes; return False if some are in use."""

    async def wake(self) -> None:
        """Wake an idle engine, so that it looks for work."""
