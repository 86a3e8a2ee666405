"""One request inside vLLM's AsyncLLM: with `stamps` and `engine_errors` all that knows its inside.

`AsyncLLM.generate` hides what a replica needs: the moment a request is registered (a drain has to
find it), its internal id, and the list of weight versions that grows while it runs. vLLM shows that
list at most when a request ends, and a request that is killed never ends. So this file does what
`generate` does, with the same calls: `add_request`, then its collector, then `abort`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineGenerateError

from rose.replica.engine_errors import BAD_REQUESTS, ENGINE_FAILURES, ErrorWithStatus
from rose.replica.kv_ages import KvAges
from rose.replica.stamps import stamps_of
from rose.replica.versions import Start, split_spans
from rose.replica.wire import Chunk, GenerateBody, Sampling

_BAD_REQUEST = 400
_UNAVAILABLE = 503


class RequestRefusedError(Exception):
    """The engine does not take a request; `status` is the HTTP status that says why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new since the last look; `finish_reason` is the engine's, None while it runs."""

    chunks: list[Chunk]
    finish_reason: str | None


class EngineRequest:
    """A registered request. Read it with `next` until it finishes, else abort it."""

    __slots__ = ("_ages", "_began", "_collector", "_starts", "id", "tokens")

    def __init__(
        self,
        collector: Any,  # noqa: ANN401 - vLLM's RequestOutputCollector
        starts: Sequence[Start] | None,
        ages: KvAges,
        began: int,
    ) -> None:
        self._collector = collector
        self._starts = starts
        self._ages = ages
        self._began = began
        self.id: str = collector.request_id
        self.tokens = 0

    @classmethod
    async def start(
        cls,
        engine: Any,  # noqa: ANN401 - vLLM's AsyncLLM
        body: GenerateBody,
        ages: KvAges,
    ) -> Self:
        """Hand a turn to the engine. Raises RequestRefusedError for what the engine refuses."""
        _check_stops(engine, body.sampling)
        began, salt = ages.current, ages.salted(body.cache_salt)
        try:
            collector = await engine.add_request(
                body.request_id,
                tokens_input(body.token_ids, cache_salt=salt),
                _parameters(body.sampling),
                priority=body.priority,
            )
        except ErrorWithStatus as error:
            raise RequestRefusedError(_status(error), str(error)) from error
        except BAD_REQUESTS as error:
            raise RequestRefusedError(_BAD_REQUEST, str(error)) from error
        except ENGINE_FAILURES as error:
            raise RequestRefusedError(_UNAVAILABLE, str(error)) from error
        return cls(collector, stamps_of(engine).starts(collector), ages, began)

    async def next(self) -> Delta:
        """Wait for output; what came since the last call is merged.

        Raises UnknownVersionError, the engine's own failures, and what `interrupt` was given.
        """
        output = self._collector.get_nowait() or await self._collector.get()
        completion = output.outputs[0]
        chunks = self._chunks(completion) if completion.token_ids else []
        return Delta(chunks, completion.finish_reason)

    def interrupt(self, error: Exception) -> None:
        """Make `next` raise at once."""
        self._collector.put(error)

    def _chunks(self, completion: Any) -> list[Chunk]:  # noqa: ANN401 - vLLM's CompletionOutput
        tokens, logprobs = completion.token_ids, _sampled_logprobs(completion.logprobs)
        so_far = self.tokens + len(tokens)
        if completion.finish_reason is not None and len(logprobs) == len(tokens) + so_far:
            # 0.25 repeats all logprobs of a request in a last output that has no token of its own.
            logprobs = logprobs[: len(tokens)]
        if len(logprobs) != len(tokens):
            raise EngineGenerateError(f"{len(tokens)} tokens came with {len(logprobs)} logprobs")
        first, self.tokens = self.tokens, so_far
        spans = split_spans(self._version_starts(completion), first, len(tokens))
        if len(spans) == 1:
            version = spans[0][0]
            return [Chunk(tokens, logprobs, version, self._older(version))]
        return [
            Chunk(tokens[a:b], logprobs[a:b], version, self._older(version))
            for version, a, b in spans
        ]

    def _older(self, version: int) -> int | None:
        if version == self._began:
            return None
        oldest = self._ages.oldest(self._began, version)
        return None if oldest == version else oldest

    def _version_starts(self, completion: Any) -> Sequence[Start]:  # noqa: ANN401 - vLLM's own
        if self._starts is not None:
            return self._starts
        return [(span.version, span.start) for span in completion.weight_versions or ()]


async def abort(engine: Any, requests: Sequence[EngineRequest]) -> None:  # noqa: ANN401 - AsyncLLM
    """End requests. Needs no engine step: each collector has its last output before this awaits."""
    if requests:
        await engine.abort([request.id for request in requests], internal=True)


def _status(error: Any) -> int:  # noqa: ANN401 - an ErrorWithStatus
    return int(error.http_status)


def _check_stops(engine: Any, sampling: Sampling) -> None:  # noqa: ANN401 - AsyncLLM
    """Refuse what would end the engine: before `min_tokens` vLLM masks every stop by index."""
    if not sampling.min_tokens:
        return
    size: int = engine.model_config.get_vocab_size()
    end = engine.renderer.get_eos_token_id()
    stops = [*(sampling.stop_token_ids or ()), *(() if end is None else (end,))]
    outside = [token for token in stops if not 0 <= token < size]
    if outside:
        raise RequestRefusedError(
            _BAD_REQUEST,
            f"min_tokens needs stops inside the vocabulary of {size} tokens, not {outside[0]}",
        )


def _sampled_logprobs(flat: Any) -> list[float]:  # noqa: ANN401 - vLLM's FlatLogprobs
    """The first of each position is the sampled token's; others appear if a neighbour asked."""
    values: list[float] = flat.logprobs
    if len(values) == len(flat.start_indices):
        return values
    return [values[start] for start in flat.start_indices]


def _parameters(sampling: Sampling) -> SamplingParams:
    parameters = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        allowed_token_ids=sampling.allowed_token_ids,
        seed=sampling.seed,
        logprobs=0,
        flat_logprobs=True,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    # These parameters are this request's own: no deep copy of them is needed.
    parameters.skip_clone = True
    return parameters
