"""Requests inside vLLM's AsyncLLM.

`AsyncLLM.generate` hides facts that a replica needs: the moment at which a request is registered (a
drain has to find it), its internal id, and the list of weight versions that grows while it runs.
vLLM shows that list at most when a request ends, and a killed request never ends. So
`EngineRequest` makes the same calls: `add_request`, then its collector, then `abort`.

Errors of vLLM at a request are caught by the names of the installed version: 0.25 has neither a
common base nor errors with an HTTP status.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self
from weakref import WeakKeyDictionary

import msgspec
from vllm import SamplingParams, exceptions
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from rose.contract.replica import (
    PROMPT_PLACES,
    GenerateBody,
    Sampling,
    StreamLine,
    StructuredOutputs,
)
from rose.replica.engine import OutputDelta, RequestRefusedError
from rose.replica.token_versions import KvStaleness, Start, split_spans
from rose.replica.vllm.stamps import stamps_of
from rose.tracing import TraceContext


class _NeverRaisedError(Exception):
    """Stand-in for an error that a version does not have."""


def _known(name: str) -> type[Exception]:
    found: type[Exception] = getattr(exceptions, name, _NeverRaisedError)
    return found


ErrorWithStatus = _known("GracefulHTTPError")
"""An error whose `http_status` is the answer's."""
BAD_REQUESTS = (_known("VLLMClientError"), ValueError)
ENGINE_FAILURES = (_known("VLLMError"), EngineDeadError, EngineGenerateError)


_BAD_REQUEST: Final = 400
_UNAVAILABLE: Final = 503


class EngineRequest:
    """A registered request. Read it with `next` until it finishes, else abort it."""

    __slots__ = ("_ages", "_began", "_collector", "_starts", "_wants_prompt", "id", "tokens")

    def __init__(
        self,
        collector: Any,  # noqa: ANN401 - vLLM's RequestOutputCollector
        starts: Sequence[Start] | None,
        ages: KvStaleness,
        began: int,
        wants_prompt: bool = False,
    ) -> None:
        self._wants_prompt = wants_prompt
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
        ages: KvStaleness,
        trace: TraceContext | None = None,
    ) -> Self:
        """Start a turn in the engine. Raises RequestRefusedError."""
        _check_ids(engine, body)
        ends = () if body.sampling.ignore_eos else ends_of(engine)
        began, salt = ages.current, ages.salted(body.cache_salt)
        try:
            collector = await engine.add_request(
                body.request_id,
                tokens_input(body.token_ids, cache_salt=salt),
                _parameters(body.sampling, ends),
                priority=body.priority,
                **_traced(engine, trace),
            )
        except ErrorWithStatus as error:
            raise RequestRefusedError(_status(error), str(error)) from error
        except BAD_REQUESTS as error:
            raise RequestRefusedError(_BAD_REQUEST, str(error)) from error
        except ENGINE_FAILURES as error:
            raise RequestRefusedError(_UNAVAILABLE, str(error)) from error
        wants_prompt = body.sampling.prompt_logprobs is not None
        return cls(collector, stamps_of(engine).starts(collector), ages, began, wants_prompt)

    async def next(self) -> OutputDelta:
        """Wait for output; output since the last call is merged.

        Raises UnknownVersionError, the engine's own failures, and the error of `interrupt`.
        """
        output = self._collector.get_nowait() or await self._collector.get()
        completion = output.outputs[0]
        chunks = self._chunks(completion) if completion.token_ids else []
        if self._wants_prompt and chunks:
            return self._with_prompt(output.prompt_logprobs, chunks, completion.finish_reason)
        return OutputDelta(chunks, completion.finish_reason)

    def _with_prompt(
        self,
        found: Any,  # noqa: ANN401 - vLLM's PromptLogprobs
        chunks: list[StreamLine],
        finish_reason: str | None,
    ) -> OutputDelta:
        """Return the first tokens after the logprobs of their prompt, all of one version."""
        self._wants_prompt = False
        version = chunks[0].version
        if version != self._began:
            # Some may be of the version before: the turn is requested again.
            return OutputDelta([], "abort")
        return OutputDelta([*_prompt_lines(found or (), version), *chunks], finish_reason)

    def interrupt(self, error: Exception) -> None:
        """Make `next` raise at once."""
        self._collector.put(error)

    def _chunks(self, completion: Any) -> list[StreamLine]:  # noqa: ANN401 - vLLM's CompletionOutput
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
            return [StreamLine(tokens, logprobs, version, self._older(version))]
        return [
            StreamLine(tokens[a:b], logprobs[a:b], version, self._older(version))
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


def _status(error: Any) -> int:  # noqa: ANN401 - an ErrorWithStatus
    return int(error.http_status)


def _traced(engine: Any, trace: TraceContext | None) -> dict[str, Any]:  # noqa: ANN401 - AsyncLLM
    """Return the trace headers for an engine that sends spans (`--otlp-traces-endpoint`).

    Another engine would log a warning for the first turn, and does not use them.
    """
    if trace is None:
        return {}
    config = getattr(engine, "observability_config", None)
    sends = getattr(config, "otlp_traces_endpoint", None) is not None
    return {"trace_headers": trace.headers()} if sends else {}


def _check_ids(engine: Any, body: GenerateBody) -> None:  # noqa: ANN401 - AsyncLLM
    """Refuse token ids that would end the engine, which looks them up without a check.

    vLLM checks those of a prompt and `allowed_token_ids` only with a tokenizer, and masks every
    stop by index before `min_tokens`.
    """
    size: int = engine.model_config.get_vocab_size()
    sampling = body.sampling
    named = {"token_ids": body.token_ids, "allowed_token_ids": sampling.allowed_token_ids or ()}
    if sampling.min_tokens:
        end = engine.renderer.get_eos_token_id()
        ends = () if end is None else (end,)
        named["min_tokens with stop_token_ids"] = [*(sampling.stop_token_ids or ()), *ends]
    for field, ids in named.items():
        if ids and not (min(ids) >= 0 and max(ids) < size):
            outside = next(token for token in ids if not 0 <= token < size)
            raise RequestRefusedError(
                _BAD_REQUEST, f"{field}: {outside} is not one of the vocabulary's {size} tokens"
            )


def _sampled_logprobs(flat: Any) -> list[float]:  # noqa: ANN401 - vLLM's FlatLogprobs
    """Return each position's first entry, the sampled token's; a neighbour may ask for others."""
    values: list[float] = flat.logprobs
    if len(values) == len(flat.start_indices):
        return values
    return [values[start] for start in flat.start_indices]


def ends_of(engine: Any) -> tuple[int, ...]:  # noqa: ANN401 - AsyncLLM
    """Return the model's own ends of a sequence, as vLLM has them by default.

    The engine knows only its tokenizer's, and those only if it has loaded one.
    """
    if engine not in _ENDS:
        _ENDS[engine] = _read_ends(engine)
    return _ENDS[engine]


_ENDS: "WeakKeyDictionary[Any, tuple[int, ...]]" = WeakKeyDictionary()


def _read_ends(engine: Any) -> tuple[int, ...]:  # noqa: ANN401 - AsyncLLM
    config = engine.model_config
    try:
        text = (Path(config.model) / "generation_config.json").read_bytes()
        said = msgspec.json.decode(text, type=dict[str, Any]).get("eos_token_id")
    except (OSError, msgspec.MsgspecError):
        said = None
    if said is None:
        said = getattr(config.hf_config, "eos_token_id", None)
    ids = [*said] if isinstance(said, list) else [said]
    ids.append(engine.renderer.get_eos_token_id())
    size: int = config.get_vocab_size()
    return tuple({each: None for each in ids if each is not None and 0 <= each < size})


def _prompt_lines(found: Any, version: int) -> list[StreamLine]:  # noqa: ANN401 - vLLM's own
    """Return lines with the logprobs of a prompt."""
    places = [
        None if not place else [(token, each.logprob, each.rank) for token, each in place.items()]
        for place in found
    ]
    return [
        StreamLine(version=version, prompt_logprobs=places[start : start + PROMPT_PLACES])
        for start in range(0, len(places), PROMPT_PLACES)
    ]


def _structured(asked: StructuredOutputs) -> StructuredOutputsParams:
    """Raises RequestRefusedError for a constraint that vLLM does not take."""
    given = {name: getattr(asked, name) for name in asked.__struct_fields__}
    if asked.choice is not None:
        given["choice"] = [*asked.choice]
    try:
        # Only the given fields: a version may not know all of them.
        return StructuredOutputsParams(**{name: each for name, each in given.items() if each})
    except (TypeError, ValueError) as error:
        raise RequestRefusedError(_BAD_REQUEST, f"structured_outputs: {error}") from error


def _parameters(sampling: Sampling, ends: Sequence[int] = ()) -> SamplingParams:
    structured = sampling.structured_outputs
    stops = _listed(sampling.stop_token_ids)
    parameters = SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=[*dict.fromkeys([*(stops or ()), *ends])] if ends else stops,
        allowed_token_ids=_listed(sampling.allowed_token_ids),
        seed=sampling.seed,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        prompt_logprobs=sampling.prompt_logprobs,
        structured_outputs=None if structured is None else _structured(structured),
        logprobs=0,
        flat_logprobs=True,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    # These parameters are this request's own: no deep copy of them is needed.
    parameters.skip_clone = True
    return parameters


def _listed(ids: tuple[int, ...] | None) -> list[int] | None:
    return None if ids is None else [*ids]
