"""vLLM's AsyncLLM as a replica's engine, and requests inside it.

`AsyncLLM.generate` hides facts that a replica needs: the moment at which a request is registered (a
drain has to find it), its internal id, and the list of weight versions that grows while it runs.
vLLM shows that list at most when a request ends, and a killed request never ends. So `VllmRequest`
makes the same calls: `add_request`, then its collector, then `abort`. The pause is that of
`AsyncLLM.pause_generation` without the 20 ms sleep at its end, which is there for callers that must
have seen the last outputs. Versions do not depend on that.

vLLM 0.32 sends the versions of tokens with every batch of outputs, 0.25 does not. For it this
process counts:

    engine core   tokens of a │ paused │ commit, `activate(v)` │ resumed │ tokens of v
    output queue  ────── a ───┤                                          ├────── v ──────

Outputs and answers come through one socket in order, and the engine answers a pause once no step is
in flight: outputs put into the queue before `activate` were sampled under the old version, later
ones under the new one. The time at which an output is taken out of the queue proves nothing, so
tokens are counted when they are put in.

Errors of vLLM at a request are caught by the names of the installed version: 0.25 has neither a
common base nor errors with an HTTP status.
"""

import asyncio
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, Self
from weakref import WeakKeyDictionary

from msgspec import structs
from vllm import SamplingParams, envs, exceptions
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.output_processor import RequestState

from rose.contract.replica import (
    GenerateBody,
    PromptLogprobs,
    RoutedExperts,
    Sampling,
    StreamLine,
    StructuredOutputs,
    top_rows,
)
from rose.images import Image
from rose.replica.engine import (
    BAD_REQUEST,
    MOST_WARM_UP_TOKENS,
    HeldAdapter,
    OutputDelta,
    RequestRefusedError,
    StampedRequest,
    WarmUpSizes,
    check_most,
    model_ends,
)
from rose.replica.token_versions import UNNAMED, KvStaleness, Start, split_spans
from rose.tracing import TraceContext
from weight_transfer.vllm.adapters import SURFACES as ADAPTER_SURFACES
from weight_transfer.vllm.adapters import adapter_number
from weight_transfer.vllm.disable_cpu_packing import SURFACES as SEED_SURFACES
from weight_transfer.vllm.live_model import SURFACES as WEIGHT_SURFACES

_ENGINE_SAYS: Final = hasattr(RequestState, "track_weight_version")
_UNAVAILABLE: Final = 503
NO_ROUTES: Final = (
    "routed_experts: the engine gives none; start it with --enable-return-routed-experts, which"
    " needs a mixture of experts, a prefix cache and vLLM's model runner V2"
)
VARIES: Final = (
    "deterministic: what the engine computes depends on its batch; start it with"
    " VLLM_BATCH_INVARIANT=1 on an NVIDIA GPU"
)
_of_engines: "Final[WeakKeyDictionary[Any, Stamps]]" = WeakKeyDictionary()
_ENDS: "Final[WeakKeyDictionary[Any, tuple[int, ...]]]" = WeakKeyDictionary()


SURFACES: Final = (
    *WEIGHT_SURFACES,
    *ADAPTER_SURFACES,
    *SEED_SURFACES,
    "v1.engine.async_llm:AsyncLLM.add_request(request_id, prompt, params, priority, trace_headers)",
    "v1.engine.async_llm:AsyncLLM.abort(request_id, internal)",
    "v1.engine.async_llm:AsyncLLM.collective_rpc(method, args)",
    "v1.engine.async_llm:AsyncLLM.resume_generation",
    "v1.engine.async_llm:AsyncLLM.is_paused",
    "v1.engine.async_llm:AsyncLLM.reset_prefix_cache",
    "v1.engine.async_llm:AsyncLLM[engine_core, output_processor, vllm_config, renderer]",
    "v1.engine.core_client:AsyncMPClient.pause_scheduler_async(mode, clear_cache)",
    "v1.engine.core_client:AsyncMPClient._call_utility_async(method, engine)",
    "v1.engine.output_processor:OutputProcessor[request_states]",
    "v1.engine.output_processor:RequestState[queue]",
    "v1.engine.output_processor:RequestOutputCollector.get_nowait",
    "v1.engine.output_processor:RequestOutputCollector.put",
    "inputs.engine:tokens_input(prompt_token_ids, cache_salt)",
)
"""Names of vLLM that turns and updates of a replica use (`executor.engine_surfaces`)."""


class _NeverRaisedError(Exception):
    """Stand-in for an exception type that the installed vLLM does not have."""


def _known(name: str) -> type[Exception]:
    found: type[Exception] = getattr(exceptions, name, _NeverRaisedError)
    return found


ErrorWithStatus = _known("GracefulHTTPError")
"""An error whose `http_status` is the answer's."""
BAD_REQUESTS = (_known("VLLMClientError"), ValueError)
ENGINE_FAILURES = (_known("VLLMError"), EngineDeadError, EngineGenerateError)


class EngineStamps:
    """Token versions of a vLLM that reports them with its outputs (0.32)."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 -- vLLM's AsyncLLM
        # `_of_engines` keeps this object as long as the engine lives, so it must not keep the
        # engine.
        self._engine = weakref.proxy(engine)

    def starts(self, collector: Any) -> Sequence[Start] | None:  # noqa: ANN401 -- vLLM's collector
        """Return a request's list of (version name, first output token), which grows while it runs;
        None if the request has ended, so that its last output has them.
        """
        state = self._engine.output_processor.request_states.get(collector.request_id)
        found: Sequence[Start] | None = None if state is None else state.weight_version_starts
        return found

    async def activate(self, version: int) -> None:
        """Stamp tokens sampled from now on with this version; call it while the engine is
        paused.
        """
        await self._engine.update_weight_version(str(version))


class CountedStamps:
    """Token versions of a vLLM that reports none (0.25): tokens are counted as they enter the
    output queue.
    """

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 -- vLLM's AsyncLLM
        """Wrap the engine's output queue; create it before the first request."""
        self._states = engine.output_processor.request_states
        self._version = UNNAMED
        self._tokens: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._starts: WeakKeyDictionary[Any, list[Start]] = WeakKeyDictionary()
        queue = engine.engine_core.outputs_queue
        self._put = queue.put_nowait
        queue.put_nowait = self._count_and_put

    def __len__(self) -> int:
        return len({*self._tokens, *self._starts})

    def starts(self, collector: Any) -> list[Start]:  # noqa: ANN401 -- vLLM's collector
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


Stamps = EngineStamps | CountedStamps


def stamps_of(engine: Any) -> Stamps:  # noqa: ANN401 -- vLLM's AsyncLLM
    """Return the token versions of an engine; the same object for each call with that engine."""
    stamps: Stamps | None = _of_engines.get(engine)
    if stamps is None:
        stamps = EngineStamps(engine) if _ENGINE_SAYS else CountedStamps(engine)
        _of_engines[engine] = stamps
    return stamps


class VllmRequest(StampedRequest):
    """Request of one turn in vLLM's AsyncLLM."""

    __slots__ = (
        "_collector",
        "_lead",
        "_most",
        "_prompt_routes",
        "_rows",
        "_shape",
        "_starts",
        "_state",
        "_wants_routes",
    )

    def __init__(
        self,
        collector: Any,  # noqa: ANN401 - vLLM's RequestOutputCollector
        starts: Sequence[Start] | None,
        ages: KvStaleness,
        began: int,
        sampling: Sampling,
        state: Any = None,  # noqa: ANN401 - vLLM's RequestState
        prompt_tokens: int = 0,
    ) -> None:
        """Record the turn; `state` is for logprobs of other tokens and for experts, if `sampling`
        asks for them.
        """
        start = sampling.routed_experts_prompt_start
        # The last token of a prompt is the position before the first token of the output.
        self._lead = 0 if start is None else prompt_tokens - 1 - start
        wants_prompt = sampling.prompt_logprobs is not None or self._lead > 0
        super().__init__(collector.request_id, ages, began, wants_prompt)
        self._collector = collector
        self._starts = starts
        self._most = sampling.logprobs
        self._state = state
        self._wants_routes = start is not None
        self._rows = bytearray()
        self._shape: RoutedExperts | None = None
        self._prompt_routes: RoutedExperts | None = None

    @classmethod
    async def start(
        cls,
        engine: Any,  # noqa: ANN401 - vLLM's AsyncLLM
        body: GenerateBody,
        ages: KvStaleness,
        trace: TraceContext | None = None,
        adapter: HeldAdapter | None = None,
        images: Sequence[Image] = (),
    ) -> Self:
        """Check and register a turn in the engine and return its request. Raises
        RequestRefusedError.
        """
        _check_ids(engine, body)
        if body.sampling.deterministic and not _batch_invariant():
            raise RequestRefusedError(BAD_REQUEST, VARIES)
        start = body.sampling.routed_experts_prompt_start
        gives_routes = _gives_routes(engine)
        if start is not None and not (gives_routes and start < len(body.token_ids)):
            raise RequestRefusedError(BAD_REQUEST, NO_ROUTES)
        ends = () if body.sampling.ignore_eos else ends_of(engine)
        prompt, ids = None, body.token_ids
        if images:
            from rose.replica import vllm_images

            prompt = await vllm_images.image_input(engine, ids, images)
            ids = prompt["prompt_token_ids"]
        began = ages.current if adapter is None else adapter.version
        salt = ages.salted(body.cache_salt)
        if prompt is None:
            prompt = tokens_input(ids, cache_salt=salt)
        else:
            vllm_images.stamp(prompt, ages, salt)
        try:
            collector = await engine.add_request(
                body.request_id,
                prompt,
                _parameters(body.sampling, ends, len(ids) if gives_routes else None),
                priority=body.priority,
                **_traced(engine, trace),
                **({} if adapter is None else {"lora_request": _slot_of(adapter)}),
            )
        except ErrorWithStatus as error:
            raise RequestRefusedError(_status(error), str(error)) from error
        except BAD_REQUESTS as error:
            raise RequestRefusedError(BAD_REQUEST, str(error)) from error
        except ENGINE_FAILURES as error:
            raise RequestRefusedError(_UNAVAILABLE, str(error)) from error
        sampling = body.sampling
        needs_state = sampling.logprobs or sampling.routed_experts_prompt_start is not None
        states = engine.output_processor.request_states if needs_state else {}
        request = cls(
            collector,
            # A request has one adapter from its first token to its last.
            [(str(began), 0)] if adapter else stamps_of(engine).starts(collector),
            ages,
            began,
            sampling,
            states.get(collector.request_id),
            len(ids),
        )
        if len(ids) != len(body.token_ids):
            request.expanded = ids
        return request

    async def next(self) -> OutputDelta:
        output = self._collector.get_nowait() or await self._collector.get()
        completion = output.outputs[0]
        chunks = self._chunks(completion) if completion.token_ids else []
        return self._delta(
            chunks,
            completion.finish_reason,
            lambda: _places(output.prompt_logprobs or ()),
            self._prompt_routes,
        )

    def interrupt(self, error: Exception) -> None:
        self._collector.put(error)

    def _chunks(self, completion: Any) -> list[StreamLine]:  # noqa: ANN401 - vLLM's CompletionOutput
        tokens, logprobs = completion.token_ids, _sampled_logprobs(completion.logprobs)
        so_far = self.tokens + len(tokens)
        if completion.finish_reason is not None and len(logprobs) == len(tokens) + so_far:
            # vLLM before 0.29 repeats a request's logprobs in a last output that has no token of
            # its own.
            logprobs = logprobs[: len(tokens)]
        if len(logprobs) != len(tokens):
            raise EngineGenerateError(f"{len(tokens)} tokens came with {len(logprobs)} logprobs")
        first, self.tokens = self.tokens, so_far
        starts = self._starts
        if starts is None:
            starts = [(span.version, span.start) for span in completion.weight_versions or ()]
        tops = self._tops(completion.logprobs, len(tokens)) if self._most else None
        routes = self._new_routes(len(tokens)) if self._wants_routes else None
        return self._cut(tokens, logprobs, split_spans(starts, first, len(tokens)), tops, routes)

    def _new_routes(self, count: int) -> RoutedExperts:
        """Return the experts of the positions before `count` new tokens, and keep those of the
        prompt apart. vLLM collects all until the request ends, and shows them then.
        """
        chunks, shape = self._state.routed_experts_chunks, self._shape
        for chunk in chunks:
            (_, layers, choices), width = chunk.shape, chunk.itemsize
            shape = self._shape = RoutedExperts(layers, choices, width, b"")
            self._rows += chunk.tobytes()
        chunks.clear()
        # With a stream interval there may be some of tokens that are held back.
        size, lead = 0 if shape is None else shape.row_bytes, self._lead
        end = (lead + count) * size
        if shape is None or len(self._rows) < end:
            raise EngineGenerateError(f"{count} tokens came without experts")
        if lead:
            self._lead = 0
            self._prompt_routes = structs.replace(shape, data=bytes(self._rows[: lead * size]))
        found = structs.replace(shape, data=bytes(self._rows[lead * size : end]))
        del self._rows[:end]
        return found

    def _tops(self, flat: Any, count: int) -> list[bytes]:  # noqa: ANN401 - vLLM's FlatLogprobs
        """Return the most likely tokens at each of `count` new tokens, and drop them in vLLM, which
        would keep 20 KB of objects for each token until the request ends.
        """
        processor = self._state.logprobs_processor if self._state and _can_drop_all() else None
        if processor is not None and len(processor.logprobs) >= count:
            processor.logprobs = processor.logprobs[count:]
        pack, rows = top_rows(self._most).pack, list[bytes]()
        for start, end in zip(flat.start_indices[:count], flat.end_indices, strict=False):
            # The sampled token is the first entry, and once more among the others if it is likely:
            # but for positions of outputs that vLLM joined, which have each token once.
            at: Sequence[int] = range(start + 1, end)
            if len(at) < self._most:
                at = sorted(range(start, end), key=flat.ranks.__getitem__)
            rows.append(pack(*[flat.token_ids[k] for k in at], *[flat.logprobs[k] for k in at]))
        return rows


class VllmEngine:
    """ReplicaEngine of vLLM's AsyncLLM; it counts token versions from its creation on if vLLM does
    not report them.
    """

    failures = ENGINE_FAILURES

    def __init__(self, engine: Any, model_dir: str = "") -> None:  # noqa: ANN401 -- vLLM's AsyncLLM
        self._engine = engine
        self.model_dir = model_dir
        self._stamps = stamps_of(engine)

    @property
    def updatable(self) -> bool:
        parallel = getattr(self._engine.vllm_config, "parallel_config", None)
        return bool(getattr(parallel, "worker_extension_cls", ""))

    @property
    def ranks(self) -> int:
        parallel = getattr(self._engine.vllm_config, "parallel_config", None)
        return max(getattr(parallel, name, 1) for name in ("world_size", "world_size_across_dp"))

    @property
    def kv_tokens(self) -> int:
        cache = self._engine.vllm_config.cache_config
        return int((cache.num_gpu_blocks or 0) * cache.block_size)

    @property
    def sizes(self) -> WarmUpSizes:
        config = self._engine.vllm_config
        return WarmUpSizes(
            config.scheduler_config.max_num_seqs,
            config.model_config.max_model_len,
            min(config.scheduler_config.max_num_batched_tokens, MOST_WARM_UP_TOKENS),
            config.model_config.get_vocab_size(),
        )

    @property
    def adapts(self) -> int:
        config = getattr(self._engine.vllm_config, "lora_config", None)
        # One slot is for the reference of a version that comes.
        return 0 if config is None else int(config.max_loras) - 1

    @property
    def no_images(self) -> str:
        try:
            from rose.replica import vllm_images

            return vllm_images.why_none(self._engine)
        except (ImportError, AttributeError):
            return "images: this version of vLLM takes none from ROSE"

    async def start(
        self,
        body: GenerateBody,
        ages: KvStaleness,
        trace: TraceContext | None = None,
        adapter: HeldAdapter | None = None,
        images: Sequence[Image] = (),
    ) -> VllmRequest:
        return await VllmRequest.start(self._engine, body, ages, trace, adapter, images)

    async def abort(self, requests: Sequence[VllmRequest]) -> None:
        if requests:
            await self._engine.abort([request.id for request in requests], internal=True)

    async def pause(self, *, clear_cache: bool) -> None:
        if clear_cache:
            await self._engine.renderer.clear_mm_cache_async()
        await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)

    async def resume(self) -> None:
        await self._engine.resume_generation()

    async def activate(self, version: int) -> None:
        await self._stamps.activate(version)

    async def call_all(self, method: str, *args: object) -> list[dict[str, Any]]:
        core = self._engine.engine_core
        cores = getattr(core, "core_engines", ())
        if len(cores) < 2:
            answers: list[dict[str, Any]] = await self._engine.collective_rpc(method, args=args)
            return answers
        # vLLM asks the core of each data-parallel rank, and returns the first one's answers alone.
        calls = (
            core._call_utility_async("collective_rpc", method, None, args, None, engine=each)
            for each in cores
        )
        of_cores = await asyncio.gather(*calls, return_exceptions=True)
        together: list[dict[str, Any]] = []
        for of_core in of_cores:
            if isinstance(of_core, BaseException):
                raise of_core
            together.extend(of_core)
        return together

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._engine.reset_prefix_cache())

    async def wake(self) -> None:
        # Any utility call ends an idle core's wait for its queue.
        await self._engine.is_paused()


def _slot_of(adapter: HeldAdapter) -> LoRARequest:
    """Return vLLM's name of an adapter, by which it keeps cached prefixes of different ones apart.

    It is in its slot already, so its path is never read.
    """
    return LoRARequest(adapter.name, adapter_number(adapter.name), adapter.job or "-")


def _status(error: Any) -> int:  # noqa: ANN401 - an ErrorWithStatus
    return int(error.http_status)


def _traced(engine: Any, trace: TraceContext | None) -> dict[str, Any]:  # noqa: ANN401 - AsyncLLM
    """Return the trace headers as an argument of add_request; empty for an engine that sends no
    spans (`--otlp-traces-endpoint`), which would log a warning.
    """
    if trace is None:
        return {}
    config = getattr(engine, "observability_config", None)
    sends = getattr(config, "otlp_traces_endpoint", None) is not None
    return {"trace_headers": trace.headers()} if sends else {}


def _check_ids(engine: Any, body: GenerateBody) -> None:  # noqa: ANN401 - AsyncLLM
    """Raise RequestRefusedError for token ids outside the vocabulary, which would crash the engine.

    vLLM checks those of a prompt and `allowed_token_ids` only with a tokenizer, and masks every
    stop by index before `min_tokens`.
    """
    size: int = engine.model_config.get_vocab_size()
    sampling = body.sampling
    check_most(sampling, size)
    named = {"token_ids": body.token_ids, "allowed_token_ids": sampling.allowed_token_ids or ()}
    if sampling.min_tokens:
        end = engine.renderer.get_eos_token_id()
        ends = () if end is None else (end,)
        named["min_tokens with stop_token_ids"] = [*(sampling.stop_token_ids or ()), *ends]
    for field, ids in named.items():
        if ids and not (min(ids) >= 0 and max(ids) < size):
            outside = next(token for token in ids if not 0 <= token < size)
            raise RequestRefusedError(
                BAD_REQUEST, f"{field}: {outside} is not one of the vocabulary's {size} tokens"
            )


def _sampled_logprobs(flat: Any) -> list[float]:  # noqa: ANN401 - vLLM's FlatLogprobs
    """Return the logprob of the sampled token at each position, which is the position's first
    entry; others may follow it.
    """
    values: list[float] = flat.logprobs
    if len(values) == len(flat.start_indices):
        return values
    return [values[start] for start in flat.start_indices]


@cache
def _can_drop_all() -> bool:
    """Return True if vLLM may keep no logprobs of a request that runs; before 0.29 it fails."""
    from vllm.logprobs import FlatLogprobs

    try:
        FlatLogprobs()[:0]
    except IndexError:
        return False
    return True


def ends_of(engine: Any) -> tuple[int, ...]:  # noqa: ANN401 - AsyncLLM
    """Return the token ids that end the model's sequences, cached for each engine.

    The engine knows only its tokenizer's, and those only if it has loaded one.
    """
    if engine not in _ENDS:
        config, own = engine.model_config, engine.renderer.get_eos_token_id()
        of_config = getattr(config.hf_config, "eos_token_id", None)
        _ENDS[engine] = model_ends(Path(config.model), of_config, own, config.get_vocab_size())
    return _ENDS[engine]


def _places(found: Any) -> PromptLogprobs:  # noqa: ANN401 - vLLM's PromptLogprobs
    return [
        None if not place else [(token, each.logprob, each.rank) for token, each in place.items()]
        for place in found
    ]


def _structured(asked: StructuredOutputs) -> StructuredOutputsParams:
    """Return vLLM's parameters of a structured-output constraint. Raises RequestRefusedError for
    one that vLLM does not support.
    """
    given = {name: getattr(asked, name) for name in asked.__struct_fields__}
    if asked.choice is not None:
        given["choice"] = [*asked.choice]
    try:
        # Only the given fields: a version may not know all of them.
        return StructuredOutputsParams(**{name: each for name, each in given.items() if each})
    except (TypeError, ValueError) as error:
        raise RequestRefusedError(BAD_REQUEST, f"structured_outputs: {error}") from error


def _gives_routes(engine: Any) -> bool:  # noqa: ANN401 - AsyncLLM
    """Return True if the engine was started with `--enable-return-routed-experts`."""
    config = getattr(engine.vllm_config, "aux_output_config", None)
    return bool(getattr(config, "enable_return_routed_experts", False))


def _batch_invariant() -> bool:
    """Return True if the engine's kernels give the same bits in every batch: a CPU has none that
    do."""
    # A version that does not know the variable ignores it.
    return bool(getattr(envs, "VLLM_BATCH_INVARIANT", False)) and current_platform.is_cuda()


def _parameters(
    sampling: Sampling, ends: Sequence[int] = (), prompt_tokens: int | None = None
) -> SamplingParams:
    """Return vLLM's parameters; `prompt_tokens`: of the turn, in an engine that returns experts."""
    structured = sampling.structured_outputs
    routes = {}
    if prompt_tokens is not None:
        # A turn that does not ask needs none of the prompt's.
        asked = sampling.routed_experts_prompt_start
        routes["routed_experts_prompt_start"] = prompt_tokens if asked is None else asked
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
        logprobs=sampling.logprobs,
        flat_logprobs=True,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        **routes,
    )
    # These parameters are this request's own: no deep copy of them is needed.
    parameters.skip_clone = True
    return parameters


def _listed(ids: tuple[int, ...] | None) -> list[int] | None:
    return None if ids is None else [*ids]
