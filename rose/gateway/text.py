"""Text in and out, for the routes that have it: a tokenizer's folder, loaded once.

Text is settled token by token: after token k exactly `ends[k]` characters are final, whoever asks.
"""

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.errors import ConfigError
from rose.gateway.errors import BadRequest

# Encoding a longer text would hold up every other turn of the event loop.
LONG_TEXT_CHARS = 16_384


class TextCodec:
    """The model's tokenizer. Raises ConfigError where it cannot be loaded."""

    def __init__(self, folder: Path) -> None:
        try:
            from transformers import AutoTokenizer

            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self.backend: Any = self._tokenizer.backend_tokenizer
        except ImportError as error:
            raise ConfigError("--tokenizer needs the package transformers: install it") from error
        except (OSError, ValueError, AttributeError, KeyError) as error:
            text = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"--tokenizer {folder}: no fast tokenizer in there ({text})"
            ) from error

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        if len(text) > LONG_TEXT_CHARS:
            return await asyncio.to_thread(self._encode, text, add_special_tokens)
        return self._encode(text, add_special_tokens)

    def chat(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
        """Token ids of a conversation. Raises BadRequest for what the chat template refuses."""
        if not self._tokenizer.chat_template:
            raise BadRequest("this tokenizer has no chat template: use /v1/completions")
        try:
            ids = self._tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=False, **options
            )
        except Exception as error:  # templates are programs and raise what they like
            raise BadRequest(f"the chat template refuses the messages: {error}") from error
        return [int(token) for token in ids]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of tokens; ids beyond the vocabulary are nothing."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str:
        """One token as text, or as the tokenizer writes it."""
        return str(self.backend.id_to_token(token_id) or "")

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)


@dataclass(frozen=True, slots=True)
class TextPlan:
    """How output becomes text: strings that end it, and what is shown."""

    codec: TextCodec
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0

    def track(self) -> "TextTrack":
        """The text of one turn, empty so far."""
        return TextTrack(self)


class TextTrack:
    """Text of one turn's output as its tokens come."""

    __slots__ = ("_decoder", "_hold", "_plan", "ends", "matched", "text")

    def __init__(self, plan: TextPlan) -> None:
        from tokenizers.decoders import DecodeStream

        self._plan = plan
        self._decoder = DecodeStream(skip_special_tokens=plan.skip_special_tokens)
        # So much of the end may turn out to be the beginning of a stop string.
        self._hold = 0 if plan.include_stop else max(map(len, plan.stop), default=1) - 1
        self.text = ""
        self.ends = array("q")
        self.matched: str | None = None

    def add(self, token_ids: Sequence[int]) -> int:
        """Take tokens in; how many belong to the answer: all, or up to a stop string's last."""
        plan = self._plan
        for count, token in enumerate(token_ids, 1):
            old = len(self.text)
            self.text += self._decoder.step(plan.codec.backend, token) or ""
            if plan.stop and len(self.ends) >= plan.min_tokens and self._stops(old):
                self.ends.append(len(self.text))
                return count
            self.ends.append(len(self.text))
        return len(token_ids)

    def shown(self, tokens: int, over: bool) -> int:
        """Characters that a reader of the first `tokens` tokens sees; all when the turn is over."""
        if over and tokens == len(self.ends):
            return len(self.text)
        return max(0, min(self.ends[tokens - 1], len(self.text)) - self._hold) if tokens else 0

    def _stops(self, old: int) -> bool:
        for stop in self._plan.stop:
            at = self.text.find(stop, max(0, old - len(stop) + 1))
            if at >= 0:
                self.matched = stop
                self.text = self.text[: at + len(stop) * self._plan.include_stop]
                return True
        return False
