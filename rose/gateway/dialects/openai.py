"""What OpenAI's two routes share, as vLLM 0.32 reads them: sampling fields and their checks."""

from collections.abc import Mapping

import msgspec

from rose.gateway.dialects.wire import StreamOptions
from rose.gateway.errors import BadRequest
from rose.gateway.model import ServedModel
from rose.gateway.origin import OriginFields
from rose.gateway.sampling import NOTHING, Sampling, refuse_unsupported
from rose.gateway.text import TextPlan, TextTrack

MAX_SAMPLES = 256
MAX_STOPS = 256
MAX_STOP_CHARS = 4_096
NEUTRAL: Mapping[str, object] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "ignore_eos": False,
    "use_beam_search": False,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
    "structured_outputs": None,
    "logit_bias": None,
    "bad_words": None,
    "truncate_prompt_tokens": None,
    "echo": False,
}


class _Format(msgspec.Struct, gc=False):
    type: str | None = None


class OpenAIBody(OriginFields, gc=False):
    """Fields of both routes; others are ignored, as OpenAI's own clients expect."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = 0
    n: int | None = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0
    min_p: float | None = 0.0
    ignore_eos: bool | None = False
    use_beam_search: bool | None = False
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    structured_outputs: msgspec.Raw = NOTHING
    response_format: _Format | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    echo: bool | None = False
    min_version: int | None = None
    exact_version: int | None = None
    timeout_s: float | None = None
    resume_from: int | None = None

    def check(self) -> None:
        """Raise BadRequest for what rollout replicas cannot do."""
        refuse_unsupported(self, NEUTRAL)
        if self.response_format is not None and self.response_format.type != "text":
            raise BadRequest("rollout replicas generate plain text only", "response_format")
        if not 1 <= self.samples <= MAX_SAMPLES:
            raise BadRequest(f"n must be between 1 and {MAX_SAMPLES}, got {self.n}", "n")
        check_stops(self.stops)

    @property
    def samples(self) -> int:
        """Answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the output."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, max_tokens: int) -> Sampling:
        """How to sample."""
        return Sampling(
            max_tokens,
            1.0 if self.temperature is None else self.temperature,
            1.0 if self.top_p is None else self.top_p,
            self.top_k or 0,
            self.min_tokens or 0,
            self.stop_token_ids or None,
            self.allowed_token_ids,
            self.seed,
        )

    def text_plan(self, model: ServedModel) -> TextPlan | None:
        """How output becomes text. Raises BadRequest for stop strings without a tokenizer."""
        if self.stops:
            model.need_codec("a stop string")
        if model.codec is None:
            return None
        return TextPlan(
            model.codec,
            self.stops,
            bool(self.include_stop_str_in_output),
            self.skip_special_tokens is not False,
            self.min_tokens or 0,
        )


def check_stops(stops: tuple[str, ...]) -> None:
    """Raise BadRequest for more stop strings than can be looked for at every token."""
    chars = sum(map(len, stops))
    if len(stops) > MAX_STOPS or chars > MAX_STOP_CHARS or not all(stops):
        raise BadRequest(
            f"stop: at most {MAX_STOPS} strings of together {MAX_STOP_CHARS} characters, "
            "none of them empty",
            "stop",
        )


def check_top_logprobs(given: int | None, name: str) -> None:
    """Raise BadRequest for alternatives to the sampled token, which no replica reports."""
    if given is not None and not 0 <= given <= 1:
        raise BadRequest(
            f"{name} is {given}: rollout replicas give the sampled token's logprob only; "
            "send 0 or 1",
            name,
        )


def token_text(model: ServedModel, token_id: int, as_ids: bool | None) -> str:
    """A token in a list of logprobs: its text, or `token_id:N` as vLLM writes it."""
    if as_ids or model.codec is None:
        return f"token_id:{token_id}"
    text = model.codec.decode([token_id])
    # Bytes of an unfinished character are no text, and vLLM shows none.
    return "" if text.endswith("\ufffd") else text


def text_between(track: TextTrack | None, start: int, end: int, over: bool) -> str:
    """Output text that tokens [start, end) settle; empty without a tokenizer."""
    if track is None:
        return ""
    return track.text[track.shown(start, False) : track.shown(end, over)]
