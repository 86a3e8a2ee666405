"""OpenAI's `POST /v1/chat/completions`, as vLLM 0.32 reads and writes it; needs a tokenizer.

Fields of ROSE: `min_version`, `exact_version`, `timeout_s`, `resume_from` in; `versions` in every
choice out, and in a session `trajectory`. Of the rendering options a caller may set the template's
variables alone. Outputs that may call tools are answered when they are whole, streams too.

`/v1/messages` and `/v1/responses` are translated into this API, and share all of it.
"""

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import msgspec

from rose.contract.gateway import TrajectoryPlace, versions_of
from rose.gateway.apis import frontend, wire
from rose.gateway.apis.completions import OpenAIBody, OpenAIResponse, OpenAIWhole
from rose.gateway.apis.frontend import NOTHING, ApiFrontend, ApiRequest
from rose.gateway.apis.tools import FOUND, FoundTools, ToolChoice, checked_tools, found_tools
from rose.gateway.errors import BadRequest
from rose.gateway.images import image_parts, name_parts
from rose.gateway.sessions import PendingTurn
from rose.gateway.text_codec import ServedModel
from rose.gateway.turns.token_stream import TokenStream
from rose.images import Image
from rose.security.callers import ANYBODY, Caller
from rose.tokenizer_pool.conversation import digest_after
from rose.tokenizer_pool.worker import Chat, Variable, unpacked

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MAX_VARIABLES = 32
MAX_VARIABLE_CHARS = 4_096
# Fields of a chat that answers of the APIs that are translated into it have no place for.
NO_PLACE = ("n", "logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids")
# Fields of their own, or tokenizer options that would change the handling of the prompt.
RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


def chat_job(
    messages: msgspec.Raw,
    variables: Mapping[str, Variable] | None,
    reasoning_effort: str | None = None,
    **options: Any,  # noqa: ANN401 - further fields of `Chat`
) -> Chat:
    """Return the conversation for the tokenizer to render. Raises BadRequest for variables that are
    too many, too large or reserved.

    messages: raw JSON. variables: values for the chat template. options: further fields of `Chat`.
    """
    given = dict(variables or {})
    if reasoning_effort is not None:
        given.setdefault("enable_thinking", reasoning_effort != "none")
        given["reasoning_effort"] = reasoning_effort
    if len(given) > MAX_VARIABLES:
        raise _refused(f"at most {MAX_VARIABLES} variables")
    for name, value in given.items():
        if not name.isidentifier() or len(name) > 64:
            raise _refused(f"{name[:64]!r} is no name of a variable")
        if name in RESERVED or name.startswith(("return_", "_")):
            raise _refused(f"{name} is no variable of the template: leave it out")
        if isinstance(value, str) and len(value) > MAX_VARIABLE_CHARS:
            raise _refused(f"{name} has more than {MAX_VARIABLE_CHARS} characters")
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
            raise _refused(f"{name} is a number of at most 64 bits")
    job = Chat(bytes(messages), given, **options)
    job.add_generation_prompt &= not job.continue_final_message
    return job


def _refused(why: str) -> BadRequest:
    return BadRequest(f"chat_template_kwargs: {why}", "chat_template_kwargs")


class _ChatUnsupported(OpenAIBody, gc=False, kw_only=True):
    add_special_tokens: bool | None = False
    media_io_kwargs: msgspec.Raw = NOTHING
    mm_processor_kwargs: msgspec.Raw = NOTHING
    return_prompt_text: bool | None = False


class ChatBody(_ChatUnsupported, gc=False, kw_only=True):
    """Request of `/v1/chat/completions`, and of the APIs that are translated into it."""

    # The process that renders them parses them.
    messages: msgspec.Raw
    logprobs: bool | None = False
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: msgspec.Raw = NOTHING
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Variable] | None = None
    documents: list[dict[str, str]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    # Without a reasoning parser, which the gateway does not have, this changes nothing.
    include_reasoning: bool | None = True


_decoder = msgspec.json.Decoder(ChatBody)


class ChatForm(NamedTuple):
    """Form of a chat's messages: the API that they are of ("" for this one), JSON of what they
    begin with, and the id of the kept answer that they follow, "" if they are the whole chat.
    """

    api: str = ""
    system: bytes = b"null"
    previous: str = ""


CHAT_FORM = ChatForm()


class ChatFrontend(ApiFrontend):
    """Frontend of `/v1/chat/completions`: it reads requests; `ChatAnswer` writes the answers."""

    path = "/v1/chat/completions"

    async def read(
        self, body: bytes, headers: Mapping[str, str], caller: Caller = ANYBODY
    ) -> ApiRequest:
        return await self._request(frontend.read_json(_decoder, body), headers, caller, ChatAnswer)

    async def _request(
        self,
        asked: ChatBody,
        headers: Mapping[str, str],
        caller: Caller,
        answer_of: "Callable[[str, ServedModel, ChatRequest], ChatAnswer]",
        form: ChatForm = CHAT_FORM,
    ) -> ApiRequest:
        """Return the turns of a chat, and the answer that `answer_of` makes of the request's id,
        the model and the chat. Raises TurnError.
        """
        self._model.check_name(asked.model)
        _check(asked, self._max_completions)
        images = await self._images_of(asked, headers, caller)
        job, tools = self._job(asked, form)
        codec, session = self._model.need_codec("a conversation"), None
        if (named := frontend.session_of(headers, asked.session_id)) or form.previous:
            job_name = frontend.job_of(headers, asked.job)
            session = self._in_session(caller, job_name, named, job, form.previous)
        done = await codec.chat(job)
        prompt = session.prompt(done) if session else unpacked(done.token_ids[0])
        if session and form.previous and (names := session.kept_images()):
            images = (*await self._taken(names, asked, headers, caller), *images)
        if session:
            session.images = tuple([image.sha256 for image in images])
        called = None if asked.tool_choice == "none" else tools
        limit = asked.max_completion_tokens
        max_tokens = asked.max_tokens if limit is None else limit
        self._model.check_length(len(prompt), max_tokens or 0)
        most = frontend.most_likely(asked.top_logprobs, "top_logprobs", counts_sampled=True)
        sampling = asked.sampling(self._model.budget(len(prompt), max_tokens), most)
        name, text = frontend.request_id_of(headers, asked.request_id), asked.text_plan(self._model)
        turns = frontend.turns_of(
            asked,
            headers,
            name,
            [prompt],
            sampling,
            samples=asked.samples,
            text=text,
            images=images,
        )
        chat = ChatRequest(asked, prompt, called, session, most)
        answer = answer_of(str(name[0]), self._model, chat)
        # A stream begins with the prompt, and the tokens of images are a replica's.
        late = called is not None or bool(images and asked.return_token_ids)
        return frontend.request_of(asked, headers, turns, answer, at_end=late)

    async def _images_of(
        self, asked: ChatBody, headers: Mapping[str, str], caller: Caller
    ) -> tuple[Image, ...]:
        """Return the images in the messages, which name them by hash from then on. Raises
        TurnError.
        """
        messages, parts, given = image_parts(bytes(asked.messages))
        if not given:
            return ()
        images = await self._taken(given, asked, headers, caller)
        asked.messages = name_parts(messages, parts, images)
        return images

    def _job(self, asked: ChatBody, form: ChatForm) -> tuple[Chat, bytes | None]:
        """Return the chat for the tokenizer to render, and JSON of its tools, None for none. Raises
        BadRequest.
        """
        tools = checked_tools(self._model, asked.tools, asked.tool_choice)
        job = chat_job(
            asked.messages,
            asked.chat_template_kwargs,
            asked.reasoning_effort,
            add_generation_prompt=asked.add_generation_prompt is not False,
            continue_final_message=bool(asked.continue_final_message),
            tools=tools or b"null",
            documents=asked.documents,
            form=form.api,
            system=form.system,
        )
        return job, tools

    def _in_session(
        self, caller: Caller, job_name: str, named: str, job: Chat, previous: str
    ) -> PendingTurn | None:
        """Return the chat's turn in the session, None if it cannot be kept; `job` gets what its
        worker needs to go on from a kept turn. Raises TurnError.
        """
        if previous and (not named or self._sessions is None):
            raise BadRequest(
                "previous_response_id needs the session that keeps its tokens: send its name as "
                "X-Session-ID with every request, or send the whole input",
                "previous_response_id",
            )
        if self._sessions is None or not job.add_generation_prompt:
            # Such an output is a part of a message, which no later message repeats as it is.
            return None
        opening = msgspec.json.encode([job.variables, job.documents]) + job.tools
        start = blake2b(opening, digest_size=16).digest()
        turn = self._sessions.begin(caller, job_name, named, start)
        if previous:
            kept = turn.after_answer(previous)
            changed = kept.start != start
            if job.system != b"null":
                message = {"role": "system", "content": msgspec.json.decode(job.system)}
                changed |= kept.first != digest_after(start, message)
            if changed:
                raise BadRequest(
                    "previous_response_id: instructions, tools and reasoning are those of that "
                    "answer's request: send the same, or the whole input",
                    "previous_response_id",
                )
            job.system = b"null"
        job.follows = turn.follows()
        return turn


def _check(asked: ChatBody, max_completions: int) -> None:
    asked.check(max_completions)
    frontend.refuse_unsupported(asked, _ChatUnsupported)
    if asked.parallel_tool_calls is False:
        raise BadRequest(
            "parallel_tool_calls: how many tools are called, the policy decides; leave it out",
            "parallel_tool_calls",
        )
    if asked.chat_template is not None:
        raise BadRequest("chat_template: only the tokenizer's own is used", "chat_template")
    if asked.top_logprobs and not asked.logprobs:
        raise BadRequest("top_logprobs needs logprobs to be true", "top_logprobs")


class _ChatTopLogprob(msgspec.Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int]


class _ChatTokenLogprob(_ChatTopLogprob, gc=False):
    top_logprobs: list[_ChatTopLogprob]


class _ChatLogprobs(msgspec.Struct, gc=False):
    content: list[_ChatTokenLogprob]


class _Message(msgspec.Struct, gc=False):
    role: str
    content: str | None
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[dict[str, object]] | msgspec.UnsetType = msgspec.UNSET
    reasoning: None = None


class ChatRequest(NamedTuple):
    """Chat as its answer needs it: the request, its prompt, JSON of the tools that the output may
    call (None for none), its turn of a session, if any, and how many of the most likely tokens come
    with each token.
    """

    asked: ChatBody
    prompt: list[int]
    tools: bytes | None
    session: PendingTurn | None
    most: int


class ChatAnswer(OpenAIResponse):
    """Writer of the answer to a `/v1/chat/completions` request, whole or streamed; each turn is one
    choice.
    """

    kind = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def __init__(self, name: str, model: ServedModel, chat: ChatRequest) -> None:
        """Keep what the answer repeats of the request; `name` is the request's id."""
        super().__init__(self.prefix + name, model, chat.asked, [chat.prompt], chat.most)
        asked, self._prompt, self._tools, self._session, _ = chat
        self._logprobs = bool(asked.logprobs)
        self._top = bool(asked.top_logprobs)
        self._stream = bool(asked.stream)
        self._found: list[FoundTools] = []

    async def prepare(self, streams: Sequence[TokenStream]) -> None:
        """Find the tool calls in all outputs, and encode the choices of an answer that is not
        streamed. Raises TurnError.
        """
        if self._tools is not None:
            for index, stream in enumerate(streams):
                found = await found_tools(self._model, self._tools, self._name, index, stream)
                self._found.append(found)
        if not self._stream:
            await super().prepare(streams)

    def choice(self, index: int, stream: TokenStream) -> dict[str, object]:
        return {
            "index": index,
            "message": self._message(index, stream),
            "logprobs": self._logprobs_of(stream, 0, len(stream.tokens)),
            "finish_reason": self._finish_reason(index, stream),
            "stop_reason": stream.stop_reason,
            "token_ids": stream.tokens.tolist() if self._ids else None,
            "routed_experts": wire.routed_experts(stream),
            "versions": versions_of(stream.versions),
            **self._place(index, stream),
        }

    def _output(self, index: int, stream: TokenStream) -> FoundTools:
        """Return the text and the tool calls of a turn that is over."""
        if self._tools is not None:
            return self._found[index]
        return FoundTools(wire.text_between(stream, 0, len(stream.tokens), True), [])

    def _message(self, index: int, stream: TokenStream) -> _Message:
        found = self._output(index, stream)
        return _Message("assistant", found.content, tool_calls=found.calls or msgspec.UNSET)

    def _place(self, index: int, stream: TokenStream) -> dict[str, TrajectoryPlace]:
        """Keep a turn that is over in its session; return its place as a field of the answer, {}
        without a session.
        """
        if self._session is None:
            return {}
        found = self._output(index, stream)
        message: dict[str, object] = {"role": "assistant", "content": found.content}
        if found.calls:
            message["tool_calls"] = found.calls
        name = self._name if self._samples == 1 else f"{self._name}-{index}"
        place = self._session.keep(name, stream, message)
        return {} if place is None else {"trajectory": place}

    def _finish_reason(self, index: int, stream: TokenStream) -> str | None:
        called = self._tools is not None and self._found[index].calls
        return FOUND if called else stream.finish_reason

    def whole(self, streams: Sequence[TokenStream]) -> bytes:
        return wire.encode(
            OpenAIWhole(
                **{**self.head(streams[0]), "object": "chat.completion"},
                choices=self._choices,
                usage=wire.TokenUsage(*self.usage(streams)),
                prompt_logprobs=wire.prompt_places(streams[0]),
                prompt_token_ids=self._prompt_of(streams[0]),
                prompt_text=None,
            )
        )

    def _prompt_of(self, stream: TokenStream) -> list[int] | None:
        return stream.expanded or self._prompt if self._ids else None

    def begin(self, streams: Sequence[TokenStream]) -> bytes:
        """Return the stream's first events: one for each choice, with the assistant's role and no
        text.
        """
        more = {"prompt_token_ids": self._prompt_of(streams[0]), "prompt_text": None}
        return b"".join(
            self.chunk(
                stream,
                0,
                {
                    "index": index,
                    "delta": {"role": "assistant", "content": ""},
                    "logprobs": None,
                    "finish_reason": None,
                },
                more,
            )
            for index, stream in enumerate(streams)
        )

    def part(self, index: int, stream: TokenStream, start: int, end: int) -> bytes:
        over = wire.is_over(stream, end)
        choice: dict[str, object] = {
            "index": index,
            "delta": self._delta(index, stream, start, end, over),
            "logprobs": self._logprobs_of(stream, start, end),
            "finish_reason": self._finish_reason(index, stream) if over else None,
        }
        if over:
            choice["stop_reason"] = stream.stop_reason
        choice["token_ids"] = stream.tokens[start:end].tolist() if self._ids else None
        choice["versions"] = versions_of(stream.spans(start, end))
        if over:
            choice |= self._place(index, stream)
        return self.chunk(stream, end, choice)

    def _delta(
        self, index: int, stream: TokenStream, start: int, end: int, over: bool
    ) -> dict[str, object]:
        if self._tools is None:
            return {"content": wire.text_between(stream, start, end, over)}
        found = self._found[index]
        if not over:
            # The whole delta is known at the end, and is sent with the last tokens.
            return {"content": ""}
        delta: dict[str, object] = {"content": found.content} if found.content else {}
        return {**delta, "tool_calls": found.deltas()} if found.calls else delta

    def _logprobs_of(self, stream: TokenStream, start: int, end: int) -> _ChatLogprobs | None:
        if not self._logprobs:
            return None
        content = []
        for place, pairs in enumerate(wire.beside(stream, start, end, self._most), start):
            text = self.token_text(stream.tokens, place)
            raw = list(text.encode("utf-8", "replace"))
            logprob = pairs[0][1]
            top = [_ChatTopLogprob(text, logprob, raw)] if self._top else []
            for token, other in pairs[1 : self._most]:
                named = self.token_text([token], 0)
                top.append(_ChatTopLogprob(named, other, list(named.encode("utf-8", "replace"))))
            content.append(_ChatTokenLogprob(text, logprob, raw, top))
        return _ChatLogprobs(content)
