"""Outputs become the text that vLLM's own detokenizer makes of them, token by token."""

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tokenizers import Tokenizer
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

from rose.gateway.text_codec import TextCodec, TextPlan
from tests.harness.tokenizer_kinds import KINDS, byte_fallback, word_piece


def _vllm_texts(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> list[str]:
    params = SimpleNamespace(
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        stop=[],
        min_tokens=0,
        include_stop_str_in_output=False,
        detokenize=True,
    )
    request = SimpleNamespace(
        sampling_params=params, prompt_token_ids=prompt, request_id="r", external_req_id="r"
    )
    wrapped = cast("Any", SimpleNamespace(_tokenizer=tokenizer))
    decoder = FastIncrementalDetokenizer(wrapped, cast("Any", request))
    return [decoder.decode_next(token) for token in output]


def _rose_texts(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> list[str]:
    codec = TextCodec.__new__(TextCodec)
    codec.backend = tokenizer
    track = TextPlan(codec).track(prompt)
    track.add(output)
    starts = [0, *track.ends]
    return [track.text[a:b] for a, b in zip(starts, track.ends, strict=False)]


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_are_the_text_that_vllm_makes_of_them(kind: str) -> None:
    tokenizer, rng = KINDS[kind](), random.Random(17)
    size = tokenizer.get_vocab_size()
    words = range(size - min(size, 10), size)
    whole = next(index for index in words if tokenizer.decode([index]).strip("\ufffd "))
    for _ in range(500):
        # Behind half a character vLLM repeats the prompt in the output: ROSE does not.
        prompt = [*rng.choices(range(size), k=rng.choice((0, 4, 99))), whole]
        output = rng.choices(rng.choice((range(size), words)), k=rng.randint(1, 24))
        assert _rose_texts(tokenizer, prompt, output) == _vllm_texts(tokenizer, prompt, output)


def test_the_stop_string_that_is_complete_first_ends_the_text() -> None:
    tokenizer = word_piece()
    codec = TextCodec.__new__(TextCodec)
    codec.backend = tokenizer
    track = TextPlan(codec, stop=("lo", "h", "e")).track([tokenizer.token_to_id("a")])
    assert track.add([tokenizer.token_to_id("hello")]) == 1
    assert (track.matched, track.text) == ("h", " ")


def test_an_invalid_byte_behind_a_character_does_not_fail_the_turn() -> None:
    tokenizer = byte_fallback(strip=False)
    output = [0xE4, 0xBD, 0xA0, 0xFF, tokenizer.token_to_id("a")]
    assert "".join(_rose_texts(tokenizer, [], output)) == "".join(
        _vllm_texts(tokenizer, [], output)
    )


def test_the_space_in_front_of_the_first_word_is_kept_behind_a_prompt() -> None:
    tokenizer = byte_fallback(strip=True)
    prompt, output = [tokenizer.token_to_id("▁a")], [tokenizer.token_to_id("▁hello")]
    assert _rose_texts(tokenizer, prompt, output) == [" hello"]


def test_a_character_begun_in_the_prompt_is_completed_without_repeating_the_prompt() -> None:
    tokenizer = byte_fallback(strip=True)
    word = tokenizer.token_to_id("▁a")
    for prompt in ([word, 0xE4, 0xBD], [0xE4, 0xBD]):
        assert "".join(_rose_texts(tokenizer, prompt, [0xA0, word])) == "你 a"
    assert "".join(_rose_texts(tokenizer, [0xFF] * 9, [word])) == "a"


@pytest.mark.parametrize("include", [False, True])
def test_the_token_that_ends_a_turn_has_text_only_where_it_is_asked_for(include: bool) -> None:
    tokenizer = byte_fallback(strip=False)
    output = [tokenizer.token_to_id("▁a"), tokenizer.token_to_id("▁hello")]
    codec = TextCodec.__new__(TextCodec)
    codec.backend = tokenizer
    track = TextPlan(codec, include_stop=include).track()
    assert track.add(output[:1]) == 1
    assert track.add(output[1:], stopped=True) == 1
    assert track.text == " a hello"[: None if include else 2]
    assert len(track.ends) == 2
