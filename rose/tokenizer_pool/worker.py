"""`python -m rose.tokenizer_pool.worker`: process that renders chat templates and tokenizes.

It runs one job at a time over its pipes; a frame on its standard streams is four bytes of length
and a msgpack struct. Templates are rendered as `transformers` renders them, piece by piece up to a
bound. Importing transformers for it would take seconds, and a killed worker must be replaced soon.
"""

import json
import os
import resource
import signal
import struct
import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from itertools import accumulate
from typing import Any, BinaryIO, ClassVar, NamedTuple, NoReturn, TypeVar

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from rose.tokenizer_pool.conversation import (
    TemplateError,
    conversation_of,
    digest_after,
    takes_parts,
)
from rose.tokenizer_pool.forms import MESSAGES, chat_of

CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
# Stands for the text of an assistant's message whose tokens are kept.
ANSWER_TAG = "KEPT_ASSISTANT_MESSAGE_TAG"
OPENING = {"role": "user", "content": "."}


class _Generation(jinja2.ext.Extension):
    """Jinja extension for `{% generation %}`, which marks an assistant's words for training.

    Rendering ignores the mark.
    """

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the parsed statements inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def template_environment() -> ImmutableSandboxedEnvironment:
    """Return a Jinja sandbox with the filters and functions that chat templates expect."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def render(
    template: jinja2.Template,
    messages: list[dict[str, Any]],
    variables: Mapping[str, Any],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    max_chars: int,
    tools: list[dict[str, Any]] | None = None,
    documents: list[dict[str, str]] | None = None,
) -> str:
    """Return the prompt text of a conversation. Raises TemplateError, or any error of the template.

    max_chars: a longer prompt raises TemplateError.
    """
    final = ""
    if continue_final_message:
        messages = deepcopy(messages)
        final = _mark(messages[-1])
    pieces: list[str] = []
    chars = 0
    for piece in template.generate(
        messages=messages,
        tools=tools,
        documents=documents,
        add_generation_prompt=add_generation_prompt,
        **variables,
    ):
        chars += len(piece)
        if chars > max_chars:
            raise TemplateError(f"the prompt is longer than {max_chars} characters")
        pieces.append(piece)
    text = "".join(pieces)
    return _cut(text, final) if continue_final_message else text


def _mark(message: dict[str, Any]) -> str:
    """Append CONTINUE_TAG to a message's text, and return the text without the tag."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + CONTINUE_TAG
        return content
    for block in reversed(content if isinstance(content, list) else []):
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            found: str = block["text"]
            block["text"] = found + CONTINUE_TAG
            return found
    raise TemplateError("continue_final_message: the final message has no text to continue")


def _cut(text: str, final: str) -> str:
    """Return the text before the tag, without the blanks that the template stripped."""
    tag = CONTINUE_TAG.strip()
    at = text.rfind(tag)
    if at < 0 or final.strip() not in text:
        raise TemplateError(
            "continue_final_message: the template leaves out the final message or a part of it"
        )
    return text[:at] if text.startswith(CONTINUE_TAG, at) else text[:at].rstrip()


LENGTH = struct.Struct(">I")
# Token ids of the longest prompt and their strings; anything near this is not an answer.
MAX_FRAME_BYTES = 256 << 20

Variable = bool | int | float | str | None


class Setup(msgspec.Struct, tag=True):
    """First frame to a worker: the tokenizer as `tokenizers` writes it, and its chat templates.

    tool_template: for conversations with tools; the same one if the tokenizer has one alone.
    special: the template's special tokens by name. memory_bytes: bound on allocations beyond the
    tokenizer. time_s: bound on a job. max_chars: bound on a rendered template.
    """

    tokenizer: str
    template: str | None
    tool_template: str | None
    special: dict[str, str | list[str]]
    max_chars: int
    memory_bytes: int
    time_s: float


class Encode(msgspec.Struct, tag=True):
    """Job: return token ids of texts; `strings` also asks for the first one's tokens as text."""

    texts: list[str]
    add_special_tokens: bool = True
    strings: bool = False


class Follows(msgspec.Struct):
    """Part of a job: earlier turns of the conversation whose tokens are kept.

    start: digest with which the chain of the messages' digests begins. known: digests of
    conversations that end with a kept turn. after: JSON of the assistant's message that `messages`
    follow, b"" if they are the whole conversation.
    """

    start: bytes
    known: list[bytes] = []
    after: bytes = b""


class Chat(msgspec.Struct, tag=True):
    """Job: return token ids of a conversation; `messages` and `tools` are the caller's JSON.

    With `follows`, only those of the text after the last kept turn, if there is one. form: API of
    the messages (forms.py). system: JSON of what they begin with.
    """

    messages: bytes
    variables: dict[str, Variable]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    strings: bool = False
    tools: bytes = b"null"
    documents: list[dict[str, str]] | None = None
    follows: Follows | None = None
    form: str = ""
    system: bytes = b"null"


class Decode(msgspec.Struct, tag=True):
    """Job: return the text of token ids, packed by `packed`."""

    token_ids: bytes


class ToolSetup(msgspec.Struct, tag=True):
    """First frame to a worker that finds tool calls (tool_worker.py); limits as in `Setup`.

    parser: one of vLLM's by name, or MODULE:CLASS. folder: of the model's tokenizer.
    """

    parser: str
    folder: str
    memory_bytes: int
    time_s: float


class ParseTools(msgspec.Struct, tag=True):
    """Job: return the tool calls in an output; `token_ids` are without the token that ended it.

    tools: JSON. stop: the string that ended the output, kept in the text with `include_stop`.
    """

    token_ids: bytes
    tools: bytes
    stop: str | None = None
    include_stop: bool = False


class FoundCall(msgspec.Struct):
    """Tool call in a model's output; `arguments` is JSON, or the model's attempt at it."""

    name: str
    arguments: str


class Done(msgspec.Struct, tag=True):
    """Answer to a job; `token_ids` are packed, one entry for each text.

    `text` answers Decode and ParseTools, the latter with the `calls`. With `follows`, `digests` are
    those up to the first message and up to the last, and `kept` is the one of the kept turn that
    the token ids follow: b"" for none, None if the template cannot render what follows alone.
    """

    token_ids: list[bytes] = []
    strings: list[str] | None = None
    text: str = ""
    calls: list[FoundCall] = []
    digests: list[bytes] = []
    kept: bytes | None = b""


class Refused(msgspec.Struct, tag=True):
    """Answer to a job that was not done, with the reason; with `last` the worker ends after it."""

    message: str
    last: bool = False


TextJob = Encode | Chat | Decode
Job = TextJob | ParseTools
encode = msgspec.msgpack.Encoder().encode
decode_job: Callable[[bytes], Any] = msgspec.msgpack.Decoder(Job).decode
decode_answer: Callable[[bytes], Done | Refused] = msgspec.msgpack.Decoder(Done | Refused).decode


def packed(token_ids: Sequence[int]) -> bytes:
    """Return token ids below 2**32 as bytes, four for each."""
    return array("I", token_ids).tobytes()


def unpacked(data: bytes) -> list[int]:
    """Return the token ids in bytes that `packed` made."""
    ids = array("I")
    ids.frombytes(data)
    return ids.tolist()


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the body of the next frame; None if the other side is gone."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = stream.read(size)
    return body if len(body) == size else None


def frame(message: object) -> bytes:
    """Return a frame with one message: length, then msgpack."""
    body = encode(message)
    return LENGTH.pack(len(body)) + body


MAX_REASON_CHARS = 300


S = TypeVar("S", Setup, ToolSetup)


class WorkerService(ABC):
    """Base of the services that do a worker's jobs; any error in a job becomes a Refused."""

    too_large: ClassVar[str]

    def answer(self, job: Any) -> Done | Refused:  # noqa: ANN401 - of its kind
        """Return a job's answer; an error, too little memory included, is a Refused."""
        try:
            return self._do(job)
        except MemoryError:
            return Refused(self.too_large, last=True)
        except Exception as error:  # noqa: BLE001 - templates and parsers raise what they like
            return Refused(f"{self._subject(job)}: {reason_of(error) or type(error).__name__}")

    @abstractmethod
    def _do(self, job: Any) -> Done: ...  # noqa: ANN401 - of its kind

    @abstractmethod
    def _subject(self, job: Any) -> str: ...  # noqa: ANN401 - of its kind


def reason_of(error: Exception) -> str:
    """Return an error's text as one line of MAX_REASON_CHARS at most."""
    return " ".join(str(error).split())[:MAX_REASON_CHARS]


class _Compiled(NamedTuple):
    """Compiled chat template, and if it takes content as parts and the developer role."""

    template: jinja2.Template
    parts: bool
    developer: bool


def _compiled(text: str | None) -> _Compiled | None:
    if text is None:
        return None
    environment = template_environment()
    developer = any(f"{quote}developer{quote}" in text for quote in "'\"")
    return _Compiled(environment.from_string(text), takes_parts(environment.parse(text)), developer)


class TextService(WorkerService):
    """Service that does Encode, Chat and Decode jobs with one tokenizer."""

    too_large = "the text needs more memory than one text may have"

    def __init__(self, setup: Setup) -> None:
        self._tokenizer: Any = Tokenizer.from_str(setup.tokenizer)
        self._setup = setup
        self._templates = [_compiled(text) for text in (setup.template, setup.tool_template)]

    def _subject(self, job: TextJob) -> str:
        return "the chat template refuses the messages" if isinstance(job, Chat) else "text"

    def _do(self, job: TextJob) -> Done:
        if isinstance(job, Decode):
            ids = unpacked(job.token_ids)
            return Done(text=str(self._tokenizer.decode(ids, skip_special_tokens=False)))
        done = Done()
        if isinstance(job, Chat):
            texts, special = [self._rendered(job, done)], False
        else:
            texts, special = job.texts, job.add_special_tokens
        found = [self._tokenizer.encode(text, add_special_tokens=special) for text in texts]
        done.strings = [str(token) for token in found[0].tokens] if job.strings else None
        done.token_ids = [packed(each.ids) for each in found]
        return done

    def _rendered(self, job: Chat, done: Done) -> str:
        """Return the text to be tokenized; `done` gets the digests, and the kept turn before it."""
        tools = msgspec.json.decode(job.tools)
        compiled = self._templates[tools is not None]
        if compiled is None:
            raise ValueError("this tokenizer has none: use /v1/completions")
        given = chat_of(job.form, *map(msgspec.json.decode, (job.messages, job.system)))
        if job.form == MESSAGES and given[-1]["role"] == "assistant":
            # The answer goes on from the assistant's words, and no later message has it alone.
            job.add_generation_prompt, job.continue_final_message = False, True
            job.follows = None

        def text_of(messages: list[Any], **changed: bool) -> str:
            prompt = {"add_generation_prompt": job.add_generation_prompt, **changed}
            return render(
                compiled.template,
                conversation_of(messages, as_parts=compiled.parts, developer=compiled.developer),
                {**self._setup.special, **job.variables},
                continue_final_message=job.continue_final_message,
                max_chars=self._setup.max_chars,
                tools=tools,
                documents=job.documents,
                **prompt,
            )

        if job.follows is None:
            return text_of(given)
        digests = [*accumulate(given, digest_after, initial=job.follows.start)][1:]
        done.digests = [digests[0], digests[-1]]
        if job.follows.after:
            place, after = -1, msgspec.json.decode(job.follows.after)
        else:
            known = {*job.follows.known}
            ends = range(len(given) - 2, -1, -1)
            place = next((k for k in ends if digests[k] in known), -1)
            if place < 0:
                return text_of(given)
            after, done.kept = given[place], digests[place]
        new = given[place + 1 :]
        # A template without the role would move a developer's message to the front.
        moved = not compiled.developer and any(each["role"] == "developer" for each in new)
        text = None if moved else _continued(text_of, after, new)
        if text is None:
            done.kept = None
        return text_of(given) if text is None else text


def _continued(
    text_of: Callable[..., str], after: dict[str, Any], new: list[dict[str, Any]]
) -> str | None:
    """Return the text that follows the assistant's message `after`: what closes it, and the new
    messages. None if the template does not render them without the messages before.

    The message's own text and calls are not in it: they are cut off where a short conversation
    with a tag in their place has them.
    """
    bare = {"role": "assistant", "content": ANSWER_TAG}
    calls = after.get("tool_calls")
    try:
        if not calls:
            return _after_tag(text_of([OPENING, bare, *new]))
        closing = _after_tag(text_of([OPENING, bare], add_generation_prompt=False)) or ""
        # Some templates show a message with calls and without text in another order.
        for content in (ANSWER_TAG, "")[: 1 if after.get("content") else 2]:
            said = {**bare, "content": content, "tool_calls": calls}
            ended = text_of([OPENING, said], add_generation_prompt=False)
            whole = text_of([OPENING, said, *new])
            # A template may leave out the text beside calls, and the tag with it.
            ended, whole = (_after_tag(text) or text for text in (ended, whole))
            # Results of calls may stand before what closes the message.
            shown = ended.removesuffix(closing)
            if whole.startswith(shown):
                return whole[len(shown) :]
    except jinja2.TemplateError:
        return None
    return None


def _after_tag(text: str) -> str | None:
    return text.partition(ANSWER_TAG)[2] if ANSWER_TAG in text else None


def serve(kind: type[S], made: Callable[[S], WorkerService]) -> None:
    """Read jobs from standard input and write their answers to standard output until either ends.

    The first frame is of type `kind`, and `made` makes the service of it; an error there is the
    answer. Nothing else may write to standard output: it is redirected to standard error.
    """
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    first = read_frame(jobs)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=kind)
    try:
        service = made(setup)
    except Exception as error:  # noqa: BLE001 - whatever it is, no job would be done
        _send(answers, Refused(reason_of(error), last=True))
        return
    _limit_memory(setup.memory_bytes)
    _send(answers, Done())
    while (data := read_frame(jobs)) is not None:
        # The pool kills jobs over `time_s`; if the pool is gone, this timer does.
        signal.setitimer(signal.ITIMER_REAL, 2 * setup.time_s)
        answer = service.answer(decode_job(data))
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(answers, answer)
        if isinstance(answer, Refused) and answer.last:
            return


def _send(answers: BinaryIO, answer: Done | Refused) -> None:
    answers.write(frame(answer))
    answers.flush()


def _limit_memory(more_bytes: int) -> None:
    """Bound the growth of the address space from now on; write no core file."""
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, now + more_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    serve(Setup, TextService)
