"""The one model that a gateway serves: its name, its length, its tokenizer."""

from dataclasses import dataclass

from rose.gateway.errors import BadRequest, UnknownModel
from rose.gateway.text import TextCodec


@dataclass(slots=True)
class ServedModel:
    """`max_model_len` in tokens, None until a setting or a replica says; `codec` only for text."""

    name: str
    max_model_len: int | None = None
    codec: TextCodec | None = None

    def check_name(self, asked: str | None) -> None:
        """Raise UnknownModel for any other model; none at all means this one."""
        if asked is not None and asked != self.name:
            raise UnknownModel(
                f"The model `{asked}` does not exist. Valid aliases: {self.name}.", "model"
            )

    def check_length(self, prompt_tokens: int, output_tokens: int = 0) -> None:
        """Raise BadRequest for a prompt that leaves no room for `output_tokens`, at least one."""
        limit = self.max_model_len
        if limit is not None and prompt_tokens + max(1, output_tokens) > limit:
            wanted = f" and {output_tokens} output tokens" if output_tokens else ""
            raise BadRequest(
                f"This model's maximum context length is {limit} tokens. However, you asked for "
                f"{prompt_tokens} input tokens{wanted}. Please reduce the length of the prompt.",
                "input_tokens",
            )

    def budget(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Output tokens of a turn: what was asked for, else what the model's length leaves.

        Raises BadRequest when neither is known.
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
        """The tokenizer. Raises BadRequest, saying what to do, where there is none."""
        if self.codec is None:
            raise BadRequest(
                f"{what} needs a tokenizer: start the gateway with --tokenizer DIR, "
                "or send token ids"
            )
        return self.codec
