"""Images in SGLang's prompts: each is written alone, and put into the prompt as it came."""

import pytest

pytest.importorskip("torch")

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from msgspec import defstruct

from rose.images import Image
from rose.replica.engine import RequestRefusedError
from rose.replica.sglang.images import image_input, joined, why_none

F = 90
NAMES = ("mm_items", "input_ids", "im_token_id", "mrope_positions")
Output = defstruct(
    "Output",
    [
        *((name, Any) for name in NAMES),
        ("padded_input_ids", Any, 0),
        ("mrope_position_delta", Any, 0),
    ],
)


def alone(height: int, width: int, token: int = F) -> Any:
    """Return the output of Qwen's processor for one image: start, F repeated, end."""
    size = height * width
    block = torch.stack(
        [
            torch.ones(size, dtype=torch.int64),
            1 + torch.arange(height).repeat_interleave(width),
            1 + torch.arange(width).repeat(height),
        ]
    )
    last = torch.full((3, 1), int(block.max()) + 1)
    positions = torch.cat([torch.zeros(3, 1, dtype=torch.int64), block, last], dim=1)
    ids = [91, *[token] * size, 92]
    return Output([SimpleNamespace(offsets=[(1, size)])], ids, F, positions)


@pytest.mark.parametrize(
    ("prompt", "starts"),
    [
        ([5, F, 6, F, 7], [1, 8]),
        ([F, F], [0, 6]),
        ([5, *[F] * 6, 6, *[F] * 2, 7], [1, 8]),
        # A session's kept tokens, and a new message.
        ([5, *[F] * 6, 6, F, 7], [1, 8]),
        # A sampled placeholder is no place of an image.
        ([5, *[F] * 6, 6, *[F] * 2, 7, F, 8], [1, 8]),
    ],
)
def test_each_image_has_its_tokens_once_and_positions_of_its_own(
    prompt: list[int], starts: list[int]
) -> None:
    found = joined(prompt, [alone(2, 3), alone(1, 2)])
    first, second = starts
    assert [item.offsets for item in found.mm_items] == [
        [(first, first + 5)],
        [(second, second + 1)],
    ]
    ids, rows = found.input_ids, found.mrope_positions.tolist()
    assert ids[first : first + 6] + ids[second : second + 2] == [F] * 8
    assert [token for token in ids if token != F] == [token for token in prompt if token != F]
    assert len(rows[0]) == len(ids)
    # Text goes on after the image's largest number, 2 beyond its first, whatever its length.
    between, after = second - first - 6, len(ids) - second - 2
    assert rows[0] == [
        *range(first),
        *[first] * 6,
        *range(first + 3, first + 3 + between),
        *[first + 3 + between] * 2,
        *range(first + 5 + between, first + 5 + between + after),
    ]
    assert rows[1][first : first + 6] == [first + row for row in (0, 0, 0, 1, 1, 1)]
    assert rows[2][first : first + 6] == [first + column for column in (0, 1, 2, 0, 1, 2)]
    assert found.mrope_position_delta.tolist() == [[max(map(max, rows)) + 1 - len(ids)]]
    assert found.padded_input_ids is None


def test_a_model_without_rotary_positions_of_images_has_none() -> None:
    part = alone(1, 2)
    part.mrope_positions = None
    found = joined([5, F], [part])
    assert (found.mrope_positions, found.mrope_position_delta) == (None, None)


@pytest.mark.parametrize(
    ("prompt", "part", "line"),
    [
        ([5, 6], alone(2, 3), "the prompt has 0 places for its 1 images"),
        ([5, F, F], alone(2, 3), "the prompt has 2 places for its 1 images"),
        ([5, F], alone(2, 3, token=7), "does not repeat a placeholder"),
    ],
)
def test_a_prompt_that_does_not_fit_its_images_is_refused(
    prompt: list[int], part: Any, line: str
) -> None:
    with pytest.raises(ValueError, match=line):
        joined(prompt, [part])


def manager_of(name: str, image_token: str) -> Any:
    async def process(**_: Any) -> Any:
        try:
            raise OSError("cannot identify\nimage")
        except OSError as error:
            raise ValueError("b'...'") from error

    tokens = SimpleNamespace(image_token_id=F, image_token=image_token)
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda _: name)
    processor = SimpleNamespace(
        mm_tokens=tokens, _tokenizer=tokenizer, process_mm_data_async=process
    )
    return SimpleNamespace(
        mm_processor=processor, max_req_input_len=9, _validate_mm_limits=lambda _: None
    )


async def test_a_file_that_is_not_read_is_refused_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages = ModuleType("standin")
    messages.GenerateReqInput = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", messages)
    with pytest.raises(RequestRefusedError, match=r"^images: cannot identify$"):
        await image_input(manager_of("<i>", "<i>"), [F], [Image.of(b"x")])


def test_an_engine_takes_what_its_processor_writes_as_a_repeated_placeholder() -> None:
    assert why_none(manager_of("<i>", "<start><i><end>")) == ""
    assert "use a replica on vLLM" in why_none(manager_of("<soft>", "<start_of_image>"))
    assert why_none(SimpleNamespace(mm_processor=None)) == "images: the engine's model takes none"
