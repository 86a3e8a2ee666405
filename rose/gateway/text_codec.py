"""Text codec: text in and out, for the routes that have it, with the tokenizer of the served model.

A tokenizer's folder is loaded once. Text is settled token by token: after token k exactly `ends[k]`
characters are final, for every reader.
"""

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rose.errors import ConfigError
from rose.gateway.errors import BadRequest, QueueFull, UnknownModel
from rose.tokenizer_pool.pool import TOOL_WORKER, TextBusy, TextPool, TextRefused
from rose.tokenizer_pool.worker import (
    Chat,
    Decode,
    Done,
    Encode,
    FoundCall,
    Job,
    ParseTools,
    Setup,
    ToolSetup,
    packed,
    unpacked,
)

if TYPE_CHECKING:
    from tokenizers.decoders import DecodeStream

# Longest text that is encoded in the event loop, in less than a millisecond.
SHORT_CHARS = 4_096
SHORT_TOKENS = 1_024
TEXT_MEMORY_BYTES = 1 << 30
# Decoders look back at a few tokens only; the whole of a long prompt would block the event loop.
PROMPT_TAIL_TOKENS = 64
# A character has at most four bytes, each of which may be a token.
MAX_CHAR_TOKENS = 4
INVALID_PREFIX = "Invalid prefix encountered"


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Limits of text work: seconds of one job in a worker process, characters of a prompt, and
    bytes of a worker's memory.
    """

    time_s: float = 5.0
    max_chars: int = 4 << 20
    memory_bytes: int = TEXT_MEMORY_BYTES


def _quiet(event: str, **fields: object) -> None:
    del event, fields


class TextCodec:
    """Tokenizer of the served model. Raises ConfigError if it cannot be loaded. End it with
    `close`.

    Conversations and long texts go to worker processes; outputs and short texts do not.
    """

    def __init__(
        self,
        folder: Path,
        limits: TextLimits = TextLimits(),
        note: Callable[..., None] = _quiet,
        tool_parser: str | None = None,
    ) -> None:
        try:
            from transformers import AutoTokenizer

            tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self.backend: Any = tokenizer.backend_tokenizer
            self.end_of_sequence: int | None = tokenizer.eos_token_id
        except ImportError as error:
            raise ConfigError("--tokenizer needs the package transformers: install it") from error
        except (OSError, ValueError, AttributeError, KeyError) as error:
            text = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"--tokenizer {folder}: no fast tokenizer in there ({text})"
            ) from error
        self._limits = limits
        self._space = _space_of(self.backend.pre_tokenizer)
        self._templates = _template_of(tokenizer), _template_of(tokenizer, tools=[{}])
        setup = Setup(
            self.backend.to_str(),
            *self._templates,
            _special_of(tokenizer),
            limits.max_chars,
            limits.memory_bytes,
            limits.time_s,
        )
        self._pool = TextPool(setup, note)
        self._tool_pool: TextPool | None = None
        if tool_parser is not None:
            tools = ToolSetup(tool_parser, str(folder), limits.memory_bytes, limits.time_s)
            self._tool_pool = TextPool(tools, note, module=TOOL_WORKER)

    def start(self) -> None:
        """Start the worker processes, so that the first conversation need not wait for them."""
        for pool in self._pools():
            pool.start()

    async def close(self) -> None:
        """End the codec's worker processes."""
        for pool in self._pools():
            await pool.close()

    @property
    def parses_tools(self) -> bool:
        """True if a tool-call parser is configured, so that tool calls can be found in outputs."""
        return self._tool_pool is not None

    async def tool_calls(self, job: ParseTools) -> tuple[str, list[FoundCall]]:
        """Return an output's text without its tool calls, and the calls. Raises TurnError."""
        if self._tool_pool is None:
            raise BadRequest("tools: start the gateway with --tool-call-parser NAME", "tools")
        done = await self._run(job, self._tool_pool)
        return done.text, done.calls

    def _pools(self) -> list[TextPool]:
        return [self._pool, *([self._tool_pool] if self._tool_pool is not None else ())]

    async def encode(
        self, texts: Sequence[str], add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the token ids of each text. Raises TurnError beyond the limits."""
        chars = sum(map(len, texts))
        if chars <= SHORT_CHARS:
            return [self._encode(text, add_special_tokens) for text in texts]
        self._check_chars(chars)
        done = await self._run(Encode(list(texts), add_special_tokens))
        return [unpacked(ids) for ids in done.token_ids]

    async def encode_with_tokens(
        self, text: str, add_special_tokens: bool
    ) -> tuple[list[int], list[str] | None]:
        """Return a text's token ids, and each token as the tokenizer's vocabulary writes it. Raises
        TurnError beyond the limits.
        """
        self._check_chars(len(text))
        done = await self._run(Encode([text], add_special_tokens, strings=True))
        return unpacked(done.token_ids[0]), done.strings

    async def chat(self, job: Chat) -> Done:
        """Return the packed token ids of a conversation rendered by the chat template, its tokens
        as text if `job.strings` asks for them, and what `job.follows` asks for.

        Raises TurnError for a refusal of the template or beyond the limits.
        """
        with_tools = job.tools != b"null"
        if self._templates[with_tools] is None:
            for_what = "default" if not with_tools and self._templates[True] else "chat"
            raise BadRequest(f"this tokenizer has no {for_what} template: use /v1/completions")
        documents = sum(len(t) for each in job.documents or () for t in each.values())
        self._check_chars(len(job.messages) + len(job.tools) + documents)
        return await self._run(job)

    async def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of any number of token ids, in a worker if they are many; ids beyond the
        vocabulary have no text.
        """
        if len(token_ids) <= SHORT_TOKENS:
            return self.decode(token_ids)
        return (await self._run(Decode(packed(token_ids)))).text

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of a few token ids at once; ids beyond the vocabulary have no text."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_ids: Sequence[int], place: int) -> str:
        """Return the text of the output token at `place` for a list of logprobs, as vLLM 0.32 shows
        it.

        A token that only begins a character has no text; the token that ends it has the whole
        character.
        """
        token = token_ids[place]
        text = self.decode([token])
        if text.endswith("\ufffd"):
            return self._completed(token_ids[max(0, place - MAX_CHAR_TOKENS) : place], token)
        if self._space is None:
            return text
        written = self.backend.id_to_token(token) or ""
        spaces = len(written) - len(written.lstrip(self._space))
        return " " * (spaces - (len(text) - len(text.lstrip(" ")))) + text if spaces else text

    def _completed(self, before: Sequence[int], token: int) -> str:
        for count in range(1, len(before) + 1):
            context = list(before[-count:])
            whole = self.decode([*context, token])
            if not whole.endswith("\ufffd"):
                while context and self.decode(context[-1:]).endswith("\ufffd"):
                    context.pop()
                shown = self.decode(context)
                while not whole.startswith(shown):
                    shown = shown[:-1]
                return whole[len(shown) :]
        return ""

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def _check_chars(self, chars: int) -> None:
        if chars > self._limits.max_chars:
            raise BadRequest(
                f"the prompt has {chars} characters; this gateway takes {self._limits.max_chars}"
            )

    async def _run(self, job: Job, pool: TextPool | None = None) -> Done:
        try:
            return await (pool or self._pool).run(job)
        except TextRefused as error:
            raise BadRequest(str(error)) from error
        except TextBusy as error:
            raise QueueFull(str(error)) from error


def _template_of(tokenizer: Any, tools: list[dict[str, object]] | None = None) -> str | None:  # noqa: ANN401 - transformers' own
    """Return the chat template that transformers uses for conversations, with tools or without;
    None if there is none.
    """
    if not tokenizer.chat_template:
        return None
    try:
        return str(tokenizer.get_chat_template(tools=tools))
    except ValueError:
        # Several templates, none of which is the default.
        return None


def _space_of(pre_tokenizer: Any) -> str | None:  # noqa: ANN401 - of tokenizers
    """Return the character that a Metaspace pre-tokenizer writes for a space, None without one;
    decoding strips it at the start of a text.
    """
    # Read the pre-tokenizer's state alone: the whole tokenizer's is megabytes.
    state = json.loads(pre_tokenizer.__getstate__()) if pre_tokenizer else {}
    steps = [state, *state.get("pretokenizers", ())]
    found = [step.get("replacement", "▁") for step in steps if step.get("type") == "Metaspace"]
    return found[0] if found else None


def _special_of(tokenizer: Any) -> dict[str, str | list[str]]:  # noqa: ANN401 - transformers' own
    return {
        name: [str(each) for each in token] if isinstance(token, list) else str(token)
        for name, token in tokenizer.special_tokens_map.items()
    }


@dataclass(frozen=True, slots=True)
class TextPlan:
    """Plan of how one turn's output becomes text: its stop strings, and which parts are shown."""

    codec: TextCodec
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0

    def track(self, prompt: Sequence[int] = ()) -> "TextTrack":
        """Return a TextTrack that decodes the output of one turn after this prompt; its text is
        empty so far.
        """
        return TextTrack(self, prompt)


def _decode_stream(plan: TextPlan, prompt: Sequence[int] = ()) -> "DecodeStream":
    from tokenizers.decoders import DecodeStream

    return DecodeStream(ids=list(prompt), skip_special_tokens=plan.skip_special_tokens)


def _whole_and_begun(plan: TextPlan, prompt: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the prompt's tokens up to its last whole character, and the tokens of a character that
    they begin.

    Both are empty if no whole character is near: the stream would repeat the prompt.
    """
    for count in range(len(prompt), max(-1, len(prompt) - MAX_CHAR_TOKENS), -1):
        if not plan.codec.decode(prompt[:count], plan.skip_special_tokens).endswith("\ufffd"):
            return prompt[:count], prompt[count:]
    return (), ()


class TextTrack:
    """Text of one turn's output, decoded as its tokens come.

    ends: number of final characters after each token. matched: stop string that ended it, or None.
    """

    __slots__ = ("_decoder", "_hold", "ends", "matched", "plan", "text")

    def __init__(self, plan: TextPlan, prompt: Sequence[int] = ()) -> None:
        self.plan = plan
        whole, begun = _whole_and_begun(plan, prompt[-PROMPT_TAIL_TOKENS:])
        self._decoder = _decode_stream(plan, whole)
        # This much of the end may turn out to be the beginning of a stop string.
        self._hold = 0 if plan.include_stop else max(map(len, plan.stop), default=1) - 1
        self.text = ""
        self.ends = array("q")
        self.matched: str | None = None
        for token in begun:
            self._step(token)

    @property
    def size_bytes(self) -> int:
        """Estimate of the memory that the kept text takes, in bytes."""
        width = 1 if self.text.isascii() else 4
        return width * len(self.text) + self.ends.itemsize * len(self.ends)

    def add(self, token_ids: Sequence[int], stopped: bool = False) -> int:
        """Decode more tokens; return the number of them that belong to the answer: all, or those up
        to the one that completes a stop string.

        stopped: True if the engine ended the turn at its last token, whose text vLLM leaves out.
        """
        plan, ends, step = self.plan, self.ends, self._step
        # Python appends in place to a string that only a local variable holds. With a second
        # reference it
        # would be copied for each token, and a long output would take quadratic time.
        text, self.text = self.text, ""
        silent = len(token_ids) if stopped and not plan.include_stop else 0
        try:
            for count, token in enumerate(token_ids, 1):
                if count == silent:
                    ends.append(len(text))
                    break
                old = len(text)
                text += step(token)
                if plan.stop and len(ends) >= plan.min_tokens:
                    cut = self._stops(text, old)
                    if cut is not None:
                        text = text[:cut]
                        ends.append(len(text))
                        return count
                ends.append(len(text))
        finally:
            self.text = text
        return len(token_ids)

    def _step(self, token: int) -> str:
        backend = self.plan.codec.backend
        try:
            return self._decoder.step(backend, token) or ""
        except Exception as error:
            if not str(error).startswith(INVALID_PREFIX):
                raise
            # Byte-fallback decoders change text that was final when an invalid byte follows it:
            # vLLM begins a new stream at such a token.
            self._decoder = _decode_stream(self.plan)
            return self._decoder.step(backend, token) or ""

    def shown(self, tokens: int, over: bool) -> int:
        """Return the number of characters that a reader of `tokens` tokens may see: less than is
        decoded while a stop string may follow; all once the turn is over.
        """
        if over and tokens == len(self.ends):
            return len(self.text)
        return max(0, min(self.ends[tokens - 1] - self._hold, len(self.text))) if tokens else 0

    def _stops(self, text: str, old: int) -> int | None:
        """Return the length at which a stop string that ends after `old` cuts the text, None if
        there is none; `matched` is set.
        """
        end = len(text) + 1
        for stop in self.plan.stop:
            at = text.find(stop, max(0, old - len(stop) + 1))
            # The stop string that is complete first counts, not the one that is named first.
            if 0 <= at < end - len(stop):
                end, self.matched = at + len(stop), stop
        if self.matched is None:
            return None
        return end if self.plan.include_stop else end - len(self.matched)


@dataclass(slots=True)
class ServedModel:
    """Model that the gateway serves, by its names; `codec` is None without a tokenizer.

    name: in answers; callers may send it, one of `aliases`, or with `any_name` anything.
    max_model_len: tokens, None until a setting or a replica gives it.
    """

    name: str
    max_model_len: int | None = None
    codec: TextCodec | None = None
    aliases: tuple[str, ...] = ()
    any_name: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names under which the model is listed: `name`, then its aliases."""
        return (self.name, *self.aliases)

    def check_name(self, asked: str | None) -> None:
        """Raise UnknownModel if a request names another model; None passes."""
        if asked is None or asked == self.name or asked in self.aliases or self.any_name:
            return
        raise UnknownModel(
            f"The model `{asked}` does not exist. Valid aliases: {', '.join(self.names)}.", "model"
        )

    def check_length(self, prompt_tokens: int, output_tokens: int = 0) -> None:
        """Raise BadRequest if the prompt leaves no room in the context for `output_tokens`, or for
        at least one; an unknown context length passes.
        """
        limit = self.max_model_len
        if limit is not None and prompt_tokens + max(1, output_tokens) > limit:
            wanted = f" and {output_tokens} output tokens" if output_tokens else ""
            raise BadRequest(
                f"This model's maximum context length is {limit} tokens. However, you asked for "
                f"{prompt_tokens} input tokens{wanted}. Please reduce the length of the prompt.",
                "input_tokens",
            )

    def budget(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Return a turn's limit of output tokens: `max_tokens`, at most the rest of the context;
        without it, that rest.

        Raises BadRequest if neither is known.
        """
        room = None if self.max_model_len is None else max(1, self.max_model_len - prompt_tokens)
        if max_tokens is not None:
            return max_tokens if room is None else min(max_tokens, room)
        if room is None:
            raise BadRequest(
                "give max_tokens: this gateway does not know the model's length "
                "(its operator can set --max-model-len)",
                "max_tokens",
            )
        return room

    def need_codec(self, what: str) -> TextCodec:
        """Return the tokenizer. Raises BadRequest, which says what to do, if there is none; `what`
        is named in it.
        """
        if self.codec is None:
            raise BadRequest(
                f"{what} needs a tokenizer: start the gateway with --tokenizer DIR, "
                "or send token ids"
            )
        return self.codec
