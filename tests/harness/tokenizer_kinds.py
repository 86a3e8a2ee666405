"""Small tokenizers of each kind, made on the spot."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_byte_tokenizer(folder: Path) -> Path:
    """Token k is byte k in the alphabet of byte-level models; 256 is special."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: k for k, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def ids_of(text: str) -> list[int]:
    """Return the text's token ids in the byte tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return [alphabet.index(letter) for word, _ in spelled for letter in word]


def text_of(tokens: list[int]) -> str:
    """Return the text of token ids of the byte tokenizer; only a space is written as itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return "".join(alphabet[token] for token in tokens).replace("Ġ", " ")


WORDS = ("hello", "world", "hé", "a", "b")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def _vocabulary(tokens: tuple[str, ...]) -> dict[str, int]:
    return {token: index for index, token in enumerate(dict.fromkeys(tokens))}


def byte_level() -> Tokenizer:
    """Tokens of bytes, as of GPT-2 and Qwen."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(_vocabulary((*letters, "hello", "Ġworld")), []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def byte_fallback(strip: bool) -> Tokenizer:
    """Tokens of characters, else of bytes; with `strip` as SentencePiece's: Llama 2, Mistral."""
    words = tuple(f"▁{word}" for word in WORDS) + WORDS
    made = Tokenizer(models.BPE(_vocabulary((*BYTES, "▁", *words)), [], byte_fallback=True))
    replaced = normalizers.Replace(" ", "▁")
    made.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), replaced]) if strip else replaced
    )
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])
    return made


def word_piece() -> Tokenizer:
    """Tokens of words and their ends, as BERT's."""
    pieces = (*WORDS, *(f"##{word}" for word in WORDS), ".", "[UNK]")
    made = Tokenizer(models.WordPiece(_vocabulary(pieces), unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level BPE": byte_level,
    "byte-fallback BPE": lambda: byte_fallback(strip=False),
    "decoder that strips": lambda: byte_fallback(strip=True),
    "WordPiece": word_piece,
}


def save_tokenizer(kind: str, folder: Path, template: str) -> int:
    """Write a tokenizer of this kind with an end of sequence; returns how many tokens it has."""
    from transformers import PreTrainedTokenizerFast

    made = KINDS[kind]()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return made.get_vocab_size() + 1
