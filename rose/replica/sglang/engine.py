"""SGLang's TokenizerManager as a replica's engine, and requests inside it.

Its scheduler is called by `scheduler_calls`. `generate_request` hides the moment at which a request
is registered, which a replica needs: its generator yields nothing before the first output. So
`SglangRequest` makes the same calls, and reads the state that SGLang keeps of a request. Each
output of a stream holds the new tokens alone (`--incremental-streaming-output`), with their
logprobs and version stamps.

An id is never the beginning of another one: SGLang aborts all that begin with the given one. Nor is
it used twice: a turn may come back while its last request still ends.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Self

import msgspec
from msgspec import structs

from executor.engine_settings import WARM_UP
from executor.sglang.compat import STAMP
from rose.contract.replica import (
    GenerateBody,
    PromptLogprobs,
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
from rose.replica.token_versions import KvStaleness, UnknownVersionError
from rose.tracing import TraceContext

KEPT_TOKENS: Final = 6
"""Tokens of a model's length that SGLang keeps for itself: a longer prompt is refused."""
ALLOWED: Final = "rose_allowed_token_ids"
"""Custom parameter of a turn with allowed tokens; see `rose.replica.sglang.plugin`."""
_numbers = itertools.count(1)


class SglangError(Exception):
    """Error raised because the engine answered wrongly, or not at all."""


class SglangRequest(StampedRequest):
    """Request of one turn in SGLang's TokenizerManager."""

    __slots__ = ("_ended", "_error", "_manager", "_prompt", "_sampling", "_state")

    def __init__(
        self,
        manager: Any,  # noqa: ANN401 -- SGLang's TokenizerManager
        rid: str,
        ages: KvStaleness,
        began: int,
        body: GenerateBody,
        expanded: list[int] | None = None,
    ) -> None:
        super().__init__(rid, ages, began, body.sampling.prompt_logprobs is not None)
        self.expanded = expanded
        self._manager = manager
        self._prompt, self._sampling = body.token_ids, body.sampling
        self._state = manager.rid_to_state[rid]
        self._error: Exception | None = None
        self._ended = False

    @classmethod
    async def start(
        cls,
        manager: Any,  # noqa: ANN401 -- SGLang's TokenizerManager
        body: GenerateBody,
        ages: KvStaleness,
        ends: Sequence[int],
        images: Sequence[Image] = (),
    ) -> Self:
        """Check and register a turn in the engine and return its request. Raises
        RequestRefusedError.
        """
        _check(manager, body)
        given, shown = body, None
        if images:
            from rose.replica.sglang.images import image_input

            shown = await image_input(manager, body.token_ids, images)
            body = structs.replace(body, token_ids=shown.input_ids)
        began = ages.current
        rid = request_id(body.request_id)
        asked = _request(rid, body, ages, () if body.sampling.ignore_eos else ends)
        if shown is not None and body.sampling.prompt_logprobs is not None:
            # SGLang has other numbers in the places of these tokens, and logprobs of another token.
            asked.token_ids_logprob = [shown.im_token_id]
        manager.auto_create_handle_loop()
        try:
            asked.normalize_batch_and_arguments()
            manager._set_default_priority(asked)
            manager._init_req_state(asked, None)
        except ValueError as error:
            raise RequestRefusedError(BAD_REQUEST, str(error)) from error
        states = {rid: manager.rid_to_state[rid]}
        try:
            if shown is None:
                tokenized = await manager._tokenize_one_request(asked)
            else:
                manager._validate_one_request(asked, body.token_ids)
                make = manager._create_tokenized_object
                tokenized = make(asked, None, body.token_ids, mm_inputs=shown)
            await manager._send_one_request(tokenized)
            expanded = None if body.token_ids == given.token_ids else body.token_ids
            return cls(manager, rid, ages, began, body, expanded)
        except ValueError as error:
            manager._release_req_states_on_failure(states)
            raise RequestRefusedError(BAD_REQUEST, str(error)) from error
        except BaseException:
            manager._release_req_states_on_failure(states)
            raise

    async def next(self) -> OutputDelta:
        state = self._state
        while True:
            if self._error is not None:
                raise self._error
            if self._ended:
                return OutputDelta([], "abort")
            if state.out_list:
                break
            state.event.clear()
            await state.event.wait()
        outputs, state.out_list = state.out_list, []
        chunks: list[StreamLine] = []
        reason: str | None = None
        for output in outputs:
            # A refusal may come with a token that nobody sampled.
            reason = _reason(output["meta_info"].get("finish_reason")) or reason
            chunks += self._chunks(output)
        return self._delta(chunks, reason, lambda: self._places(outputs[0]["meta_info"]))

    def interrupt(self, error: Exception) -> None:
        self._error = error
        self._state.event.set()

    def end(self) -> None:
        """Make `next` return an abort after its present output, and send the abort to the
        engine.
        """
        self._ended = True
        self._manager.abort_request(self.id)
        self._state.event.set()

    def _chunks(self, output: dict[str, Any]) -> list[StreamLine]:
        meta = output["meta_info"]
        # The end of a request may repeat its last token: only the count shows the new ones.
        new = int(meta["completion_tokens"]) - self.tokens
        if new <= 0:
            return []
        tokens = list(output["output_ids"])[:new]
        said = meta.get("output_token_logprobs") or []
        logprobs = [float(place[0]) for place in said[:new]]
        versions = meta.get(STAMP) or []
        if not len(tokens) == len(logprobs) == new:
            raise SglangError(f"{new} tokens came as {len(tokens)} with {len(logprobs)} logprobs")
        if len(versions) < new or None in versions[:new]:
            raise UnknownVersionError(f"no version is known for output token {self.tokens}")
        self.tokens += new
        spans = []
        for version, run in itertools.groupby(range(new), key=lambda place: int(versions[place])):
            places = list(run)
            spans.append((version, places[0], places[-1] + 1))
        tops = self._tops(meta, new) if self._sampling.logprobs else None
        return self._cut(tokens, logprobs, spans, tops)

    def _tops(self, meta: dict[str, Any], new: int) -> list[bytes]:
        """Return the most likely tokens at each of `new` tokens; SGLang may send more of them, for
        the prompt's sake.
        """
        most = self._sampling.logprobs
        rows = [row[:most] for row in (meta.get("output_top_logprobs") or [])[:new]]
        if len(rows) != new or any(len(row) != most for row in rows):
            raise SglangError(f"{new} tokens came without {most} logprobs each")
        pack = top_rows(most).pack
        return [pack(*[int(each[1]) for each in row], *[each[0] for each in row]) for row in rows]

    def _places(self, meta: dict[str, Any]) -> PromptLogprobs:
        return _places(meta, self._prompt, self._sampling.prompt_logprobs or 0)


class SglangEngine:
    """ReplicaEngine of SGLang's TokenizerManager, in the process that serves HTTP."""

    failures: tuple[type[Exception], ...] = (SglangError,)
    updatable = True

    def __init__(self, manager: Any, arguments: Any, kv_tokens: int) -> None:  # noqa: ANN401 -- SGLang's
        """Keep SGLang's manager, its ServerArgs and the number of tokens that fit in its KV
        cache.
        """
        self._manager = manager
        self._arguments = arguments
        self.kv_tokens = kv_tokens
        self.ranks = int(arguments.tp_size)
        self.model_dir = str(arguments.model_path)
        self._ends = ends_of(manager, self.model_dir)

    @property
    def sizes(self) -> WarmUpSizes:
        chunk = self._arguments.chunked_prefill_size or MOST_WARM_UP_TOKENS
        return WarmUpSizes(
            self._arguments.max_running_requests or 1,
            int(self._manager.context_len) - KEPT_TOKENS,
            min(chunk, MOST_WARM_UP_TOKENS),
            int(self._manager.model_config.vocab_size),
        )

    @property
    def adapts(self) -> int:
        return 0

    @property
    def no_images(self) -> str:
        from rose.replica.sglang.images import why_none

        return why_none(self._manager)

    async def start(
        self,
        body: GenerateBody,
        ages: KvStaleness,
        trace: TraceContext | None = None,
        adapter: HeldAdapter | None = None,
        images: Sequence[Image] = (),
    ) -> SglangRequest:
        del adapter  # Its replicas have none.
        del trace  # SGLang sends spans of its own requests; a turn's come from the gateway.
        return await SglangRequest.start(self._manager, body, ages, self._ends, images)

    async def abort(self, requests: Sequence[SglangRequest]) -> None:
        for request in requests:
            request.end()

    async def pause(self, *, clear_cache: bool) -> None:
        await self.call_all("pause", clear_cache)

    async def resume(self) -> None:
        await self.call_all("resume")

    async def activate(self, version: int) -> None:
        await self.call_all("activate", version)

    async def call_all(self, method: str, *args: object) -> list[dict[str, Any]]:
        from sglang.srt.managers.io_struct import DumperControlReqInput

        asked = DumperControlReqInput(method="rose", body={"call": method, "args": list(args)})
        (said,) = await self._manager.dumper_control(asked)
        if not said.success:
            raise SglangError(said.error)
        return [answer["answer"] for answer in said.response]

    async def reset_prefix_cache(self) -> bool:
        return bool((await self.call_all("flush"))[0])

    async def wake(self) -> None:
        await self.call_all("wake")


def ends_of(manager: Any, model_dir: str) -> tuple[int, ...]:  # noqa: ANN401 -- SGLang's
    """Return the token ids that end the model's sequences: see `model_ends`."""
    config, own = manager.model_config, getattr(manager.tokenizer, "eos_token_id", None)
    return model_ends(Path(model_dir), config.hf_eos_token_id or (), own, int(config.vocab_size))


def request_id(name: str) -> str:
    """Return a new, unique request id: a number of fixed length before the turn's name, so that no
    id is a prefix of another.
    """
    prefix = WARM_UP if name.startswith(WARM_UP) else ""
    return f"{prefix}{next(_numbers):012x}.{name}"


def _check(manager: Any, body: GenerateBody) -> None:  # noqa: ANN401 -- SGLang's
    """Raise RequestRefusedError for what this engine does not have."""
    if not body.token_ids:
        raise RequestRefusedError(BAD_REQUEST, "a turn has at least one token")
    if body.sampling.routed_experts_prompt_start is not None:
        raise RequestRefusedError(
            BAD_REQUEST,
            "routed_experts: SGLang gives them when a request ends, and a revoked one has none",
        )
    if body.sampling.deterministic and not manager.server_args.enable_deterministic_inference:
        raise RequestRefusedError(
            BAD_REQUEST,
            "deterministic: what the engine computes depends on its batch; start it with"
            " --enable-deterministic-inference on a GPU",
        )
    check_most(body.sampling, int(manager.model_config.vocab_size))


def _request(rid: str, body: GenerateBody, ages: KvStaleness, ends: Sequence[int]) -> Any:  # noqa: ANN401 -- SGLang's
    from sglang.srt.managers.io_struct import GenerateReqInput

    wanted = body.sampling.prompt_logprobs
    return GenerateReqInput(
        rid=rid,
        input_ids=list(body.token_ids),
        sampling_params=parameters(body.sampling, ends),
        return_logprob=True,
        logprob_start_len=-1 if wanted is None else 0,
        top_logprobs_num=max(wanted or 0, body.sampling.logprobs),
        stream=True,
        # One convention everywhere: lower first. SGLang is started with it, too.
        priority=body.priority,
        extra_key=ages.salted(body.cache_salt),
    )


def parameters(sampling: Sampling, ends: Sequence[int] = ()) -> dict[str, Any]:
    """Return SGLang's sampling parameters as a dict, with `ends` among the stop tokens. Raises
    RequestRefusedError for unsupported ones.
    """
    stops = [*dict.fromkeys([*(sampling.stop_token_ids or ()), *ends])]
    asked: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "max_new_tokens": sampling.max_tokens,
        "min_new_tokens": sampling.min_tokens,
        "stop_token_ids": stops or None,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "sampling_seed": sampling.seed,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.allowed_token_ids is not None:
        asked["custom_params"] = {ALLOWED: list(sampling.allowed_token_ids)}
    if sampling.structured_outputs is not None:
        asked |= _structured(sampling.structured_outputs)
    return asked


def _structured(asked: StructuredOutputs) -> dict[str, str]:
    if asked.whitespace_pattern or asked.disable_any_whitespace:
        raise RequestRefusedError(
            BAD_REQUEST, "structured_outputs: SGLang takes no rule for whitespace of one request"
        )
    if asked.choice is not None:
        return {"ebnf": f"root ::= {' | '.join(map(_quoted, asked.choice))}"}
    if asked.json_object:
        return {"json_schema": '{"type": "object"}'}
    known = {
        "json_schema": asked.json,
        "regex": asked.regex,
        "ebnf": asked.grammar,
        "structural_tag": asked.structural_tag,
    }
    found = {name: text for name, text in known.items() if text is not None}
    if len(found) != 1:
        raise RequestRefusedError(BAD_REQUEST, "structured_outputs: ask for exactly one kind")
    return found


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _reason(said: Any) -> str | None:  # noqa: ANN401 -- SGLang's JSON
    """Return SGLang's finish reason: `stop`, `length` or `abort`; None while the request runs.
    Raises RequestRefusedError for a bad request.
    """
    if said is None:
        return None
    if said.get("type") == "abort" and said.get("status_code") == BAD_REQUEST:
        raise RequestRefusedError(BAD_REQUEST, str(said.get("message", "")))
    return str(said["type"])


def _places(meta: dict[str, Any], prompt: Sequence[int], most: int) -> PromptLogprobs:
    """Return a prompt's logprobs: for each position (token, logprob, rank) of its own token first,
    then of the others among the `most` most likely. SGLang reports no ranks: one beyond `most` is
    `most` + 1, the least that it may be, and with `most` 0 None.
    """
    sampled = meta.get("input_token_logprobs") or []
    others = meta.get("input_top_logprobs") or [None] * len(sampled)
    # Logprobs of the token that stands for images, if the prompt has any.
    named = meta.get("input_token_ids_logprobs") or [None] * len(sampled)
    places: PromptLogprobs = []
    # SGLang 0.5.23 names the vocabulary's last token 0 in a prompt.
    for token, own, beside, of_image in zip(prompt, sampled, others, named, strict=False):
        if own[0] is None:
            places.append(None)
            continue
        if of_image and of_image[0][1] == token:
            own = of_image[0]
        likely = (beside or ())[:most]
        ranked = {int(t): (float(lp), rank) for rank, (lp, t, *_) in enumerate(likely, 1)}
        _, rank = ranked.pop(token, (0.0, most + 1 if most else None))
        places.append([(token, float(own[0]), rank), *((t, *row) for t, row in ranked.items())])
    return places
