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
from msgspec import structs

from rose.contract.replica import (
    PROMPT_PLACES,
    GenerateBody,
    PromptLogprobs,
    RoutedExperts,
    Sampling,
    StreamLine,
)
from rose.images import Image
from rose.replica.token_versions import KvStaleness, Span
from rose.tracing import TraceContext

WARM_UP_OUTPUT_TOKENS: Final = 3
# Most prompt tokens of a warm-up batch: more rows use the same kernels, and only take longer.
MOST_WARM_UP_TOKENS: Final = 1024
BAD_REQUEST: Final = 400
# Bytes of most likely tokens in one line, which is then far below MAX_LINE_BYTES.
LINE_COLUMN_BYTES: Final = 256 << 10


class RequestRefusedError(Exception):
    """Error raised because the engine refuses a request; `status` is the HTTP status to answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """Output of a request since the last call: lines of tokens, and the engine's finish reason,
    None while it runs.
    """

    chunks: list[StreamLine]
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class HeldAdapter:
    """LoRA adapter in an engine's slot: a job's policy version. `name`: attempt that brought it."""

    job: str
    version: int
    name: str


class StampedRequest(ABC):
    """Request that is registered in an engine; each of its tokens comes with the policy version
    that sampled it.

    Call `next` until it finishes, or abort it. tokens: number of output tokens so far. expanded:
    the prompt with the tokens of its images, if the request had placeholders for them.
    """

    __slots__ = ("_ages", "_began", "_wants_prompt", "expanded", "id", "tokens")

    def __init__(
        self, name: str, ages: KvStaleness, began: int, wants_prompt: bool = False
    ) -> None:
        """Record the version under which the turn began, and if the prompt's logprobs are to be
        sent as well.
        """
        self.id = name
        self.tokens = 0
        self.expanded: list[int] | None = None
        self._ages = ages
        self._began = began
        self._wants_prompt = wants_prompt

    @abstractmethod
    async def next(self) -> OutputDelta:
        """Wait for output and return all of it since the last call.

        Raises UnknownVersionError, the engine's own failures, RequestRefusedError if the engine
        refuses late, and the error that `interrupt` was given.
        """

    @abstractmethod
    def interrupt(self, error: Exception) -> None:
        """Make the pending or next call of `next` raise this error."""

    def _cut(
        self,
        tokens: list[int],
        logprobs: list[float],
        spans: Sequence[Span],
        tops: list[bytes] | None = None,
        routes: RoutedExperts | None = None,
    ) -> list[StreamLine]:
        """Return one line of tokens and logprobs for each (version, begin, end) span, or several
        lines where the most likely tokens at each token (`tops`) or the experts of the positions
        before them (`routes`) would make it too long.
        """
        if tops is not None or routes is not None:
            return self._cut_long(tokens, logprobs, spans, tops, routes)
        if len(spans) == 1:
            version = spans[0][0]
            return [StreamLine(tokens, logprobs, version, self._older(version))]
        return [
            StreamLine(tokens[a:b], logprobs[a:b], version, self._older(version))
            for version, a, b in spans
        ]

    def _cut_long(
        self,
        tokens: list[int],
        logprobs: list[float],
        spans: Sequence[Span],
        tops: list[bytes] | None,
        routes: RoutedExperts | None,
    ) -> list[StreamLine]:
        token_bytes = len(tops[0]) if tops else 0
        token_bytes += routes.row_bytes if routes else 0
        step = max(1, LINE_COLUMN_BYTES // token_bytes)
        cuts = [
            (version, a, min(a + step, end))
            for version, start, end in spans
            for a in range(start, end, step)
        ]
        return [
            StreamLine(
                tokens[a:b],
                logprobs[a:b],
                version,
                self._older(version),
                top_logprobs=None if tops is None else b"".join(tops[a:b]),
                routed_experts=None if routes is None else rows_between(routes, a, b),
            )
            for version, a, b in cuts
        ]

    def _delta(
        self,
        chunks: list[StreamLine],
        finish_reason: str | None,
        places: Callable[[], PromptLogprobs],
        routes: RoutedExperts | None = None,
    ) -> OutputDelta:
        """Return new output as an OutputDelta, with the prompt's logprobs and experts (`routes`)
        before the first tokens if they were asked for; "abort" if the version changed since the
        turn began.
        """
        if not (self._wants_prompt and chunks):
            return OutputDelta(chunks, finish_reason)
        self._wants_prompt = False
        version = chunks[0].version
        if version != self._began:
            # Some logprobs may be of the version before, so the turn is requested again.
            return OutputDelta([], "abort")
        found = places()
        # The first place is empty, and all others have as many alternatives.
        widest = max((len(place or ()) for place in found[-1:]), default=0)
        step = max(1, PROMPT_PLACES * 21 // max(21, widest))
        prompt = [
            StreamLine(version=version, prompt_logprobs=found[start : start + step])
            for start in range(0, len(found), step)
        ]
        if routes is not None and routes.data:
            step = max(1, LINE_COLUMN_BYTES // routes.row_bytes)
            prompt += [
                StreamLine(version=version, routed_experts=rows_between(routes, a, a + step))
                for a in range(0, len(routes.data) // routes.row_bytes, step)
            ]
        return OutputDelta([*prompt, *chunks], finish_reason)

    def _older(self, version: int) -> int | None:
        if version == self._began:
            return None
        oldest = self._ages.oldest(self._began, version)
        return None if oldest == version else oldest


def check_most(sampling: Sampling, vocabulary: int) -> None:
    """Raise RequestRefusedError for logprobs of more tokens than the vocabulary has, at which an
    engine would end.
    """
    for name, most in (
        ("logprobs", sampling.logprobs),
        ("prompt_logprobs", sampling.prompt_logprobs or 0),
    ):
        if most > vocabulary:
            raise RequestRefusedError(
                BAD_REQUEST, f"{name}: {most} is above the vocabulary's {vocabulary} tokens"
            )


def rows_between(routes: RoutedExperts, start: int, end: int) -> RoutedExperts:
    """Return the experts of the positions [start, end) of these."""
    size = routes.row_bytes
    return structs.replace(routes, data=routes.data[start * size : end * size])


def model_ends(
    model_dir: Path,
    of_config: int | Iterable[int] | None,
    of_tokenizer: int | None,
    vocabulary: int,
) -> tuple[int, ...]:
    """Return the token ids that end a model's sequences, as engines have them by default.

    They are those of `generation_config.json`, else of its configuration (`of_config`), and its
    tokenizer's; ids outside the vocabulary are left out.
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
    """Limits of the batches with which an engine is warmed up."""

    max_num_seqs: int
    max_model_len: int
    max_tokens: int
    vocabulary: int

    def batches(self) -> Iterator[tuple[int, int]]:
        """Yield (number of sequences, prompt tokens of each): every power of two up to
        `max_num_seqs`, and that number, each with short and long prompts.
        """
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
    """Interface of one engine to its API process; `model_dir` is the folder that it was started
    from.
    """

    model_dir: str

    @property
    def failures(self) -> tuple[type[Exception], ...]:
        """Exception types that the engine raises when it is ending or has ended."""

    @property
    def updatable(self) -> bool:
        """True if the engine's workers have the methods that update weights."""

    @property
    def ranks(self) -> int:
        """Number of the engine's worker ranks, which share one copy of the checkpoint."""

    @property
    def kv_tokens(self) -> int:
        """Number of tokens that fit in the engine's KV cache."""

    @property
    def sizes(self) -> WarmUpSizes:
        """Limits of the batches with which the engine is warmed up."""

    @property
    def adapts(self) -> int:
        """Number of LoRA adapters that the engine holds beside its base; 0 where versions are whole
        weights.
        """

    @property
    def no_images(self) -> str:
        """Reason why the engine takes no images, which begins with the field's name; "" if it
        does.
        """

    async def start(
        self,
        body: GenerateBody,
        ages: KvStaleness,
        trace: TraceContext | None = None,
        adapter: HeldAdapter | None = None,
        images: Sequence[Image] = (),
    ) -> StampedRequest:
        """Register a turn in the engine, with one of its adapters and its images if any, and return
        its request. Raises RequestRefusedError.
        """

    async def abort(self, requests: Sequence[Any]) -> None:
        """Abort requests that `start` returned; when this returns, the last output of each is there
        for `next`.
        """

    async def pause(self, *, clear_cache: bool) -> None:
        """Stop the engine's steps and return once none is in flight; requests stay until `resume`.

        clear_cache: drop all KV, which requests then compute again.
        """

    async def resume(self) -> None:
        """Continue the engine's steps after `pause`."""

    async def activate(self, version: int) -> None:
        """Stamp all tokens sampled from now on with this policy version; call it while the engine
        is paused.
        """

    async def call_all(self, method: str, *args: object) -> list[dict[str, Any]]:
        """Call a method of the weight worker on every rank and return one answer a rank. Raises the
        ranks' errors.
        """

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes and return True; return False if some are in use."""

    async def wake(self) -> None:
        """Wake an idle engine core, so that it runs its scheduler and can give memory back."""
