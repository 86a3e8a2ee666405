"""Interface between a replica and its engine.

`rose.replica.vllm` and `rose.replica.sglang` each implement it. Everything above them, turns,
leases, weight updates, warm-up, is the same for both, and so is what a request makes of its tokens
(`StampedRequest`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from rose.contract.replica import PROMPT_PLACES, GenerateBody, PromptLogprobs, StreamLine
from rose.replica.token_versions import KvStaleness, Span
from rose.tracing import TraceContext

WARM_UP_OUTPUT_TOKENS: Final = 3
# More rows take the same kernels: above this a prefill only takes longer.
MOST_WARM_UP_TOKENS: Final = 1024
BAD_REQUEST: Final = 400


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


class StampedRequest(ABC):
    """Registered request of an engine, whose tokens come with the version that sampled each.

    Read it with `next` until it finishes, else abort it. tokens: output tokens so far.
    """

    __slots__ = ("_ages", "_began", "_wants_prompt", "id", "tokens")

    def __init__(
        self, name: str, ages: KvStaleness, began: int, wants_prompt: bool = False
    ) -> None:
        """began: the version under which its turn began."""
        self.id = name
        self.tokens = 0
        self._ages = ages
        self._began = began
        self._wants_prompt = wants_prompt

    @abstractmethod
    async def next(self) -> OutputDelta:
        """Wait for output; output since the last call is merged.

        Raises UnknownVersionError, the engine's own failures, RequestRefusedError of an engine that
        refuses late, and the error of `interrupt`.
        """

    @abstractmethod
    def interrupt(self, error: Exception) -> None:
        """Make `next` raise at once."""

    def _cut(
        self, tokens: list[int], logprobs: list[float], spans: Sequence[Span]
    ) -> list[StreamLine]:
        """Return a line for each version's run of new tokens."""
        if len(spans) == 1:
            version = spans[0][0]
            return [StreamLine(tokens, logprobs, version, self._older(version))]
        return [
            StreamLine(tokens[a:b], logprobs[a:b], version, self._older(version))
            for version, a, b in spans
        ]

    def _delta(
        self,
        chunks: list[StreamLine],
        finish_reason: str | None,
        places: Callable[[], PromptLogprobs],
    ) -> OutputDelta:
        """Return new output; the prompt's logprobs come before the first tokens, of one version."""
        if not (self._wants_prompt and chunks):
            return OutputDelta(chunks, finish_reason)
        self._wants_prompt = False
        version = chunks[0].version
        if version != self._began:
            # Some may be of the version before: the turn is requested again.
            return OutputDelta([], "abort")
        found = places()
        prompt = [
            StreamLine(version=version, prompt_logprobs=found[start : start + PROMPT_PLACES])
            for start in range(0, len(found), PROMPT_PLACES)
        ]
        return OutputDelta([*prompt, *chunks], finish_reason)

    def _older(self, version: int) -> int | None:
        if version == self._began:
            return None
        oldest = self._ages.oldest(self._began, version)
        return None if oldest == version else oldest


def model_ends(
    model_dir: Path,
    of_config: int | Iterable[int] | None,
    of_tokenizer: int | None,
    vocabulary: int,
) -> tuple[int, ...]:
    """Return a model's own ends of a sequence, as engines have them by default.

    They are those of its generation configuration, else of its configuration, and its tokenizer's.
    """
    try:
        text = (model_dir / "generation_config.json").read_bytes()
        found = msgspec.json.decode(text, type=dict[str, Any]).get("eos_token_id")
    except (OSError, msgspec.MsgspecError):
        found = None
    if found is None:
        found = of_config
    ids = [*(found if isinstance(found, Iterable) else [found]), of_tokenizer]
    return tuple({each: None for each in ids if each is not None and 0 <= each < vocabulary})


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
    def ranks(self) -> int:
        """Number of its ranks, which share a copy of the checkpoint."""

    @property
    def kv_tokens(self) -> int:
        """Tokens that its KV cache has room for."""

    @property
    def sizes(self) -> WarmUpSizes:
        """Largest batch that it may be asked for at once."""

    async def start(
        self, body: GenerateBody, ages: KvStaleness, trace: TraceContext | None = None
    ) -> StampedRequest:
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

    async def reset_prefix_cache(self) -> bool:
        """Drop all prefixes; return False if some are in use."""

    async def wake(self) -> None:
        """Wake an idle engine, so that it looks for work."""
