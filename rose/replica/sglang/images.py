"""Images in SGLang's prompts, in either form that `rose.replica.vllm_images` draws.

SGLang's processors write a prompt anew from its text, which may change tokens beside the images.
So the processor writes each image alone, after a prompt that is its placeholder, and the image's
tokens, tensors and positions are put into the prompt as it came.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec import structs

from rose.images import Image, starts_of
from rose.replica.engine import BAD_REQUEST, RequestRefusedError

if TYPE_CHECKING:
    import torch

_FAILURES = (ValueError, AssertionError, OSError, RuntimeError, TypeError)


def why_none(manager: Any) -> str:  # noqa: ANN401 -- SGLang's TokenizerManager
    """Return the reason why the engine takes no images, "" if it does."""
    processor = manager.mm_processor
    if processor is None:
        return "images: the engine's model takes none"
    tokens = processor.mm_tokens
    name = tokens and processor._tokenizer.convert_ids_to_tokens(tokens.image_token_id)
    if name and name in tokens.image_token:
        return ""
    return (
        f"images: {type(processor).__name__} of SGLang does not repeat a placeholder for an image;"
        " use a replica on vLLM"
    )


async def image_input(
    manager: Any,  # noqa: ANN401 -- SGLang's TokenizerManager
    token_ids: list[int],
    images: Sequence[Image],
) -> Any:  # noqa: ANN401 -- SGLang's MultimodalProcessorOutput
    """Return the engine's input of a prompt with images; `input_ids`: the prompt with their tokens.
    Raises RequestRefusedError.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    processor = manager.mm_processor
    place = processor.mm_tokens.image_token
    asked = GenerateReqInput(text=place, image_data=[image.data for image in images])
    try:
        manager._validate_mm_limits(asked)
        parts = await asyncio.gather(
            *[
                processor.process_mm_data_async(
                    image_data=[data],
                    audio_data=None,
                    input_text=place,
                    request_obj=asked,
                    max_req_input_len=manager.max_req_input_len,
                )
                for data in asked.image_data
            ]
        )
        return joined(token_ids, parts)
    except _FAILURES as error:
        # SGLang's own line begins with bytes of the file.
        cause: BaseException = error
        while cause.__context__ is not None:
            cause = cause.__context__
        line = (str(cause) or type(cause).__name__).splitlines()[0]
        raise RequestRefusedError(BAD_REQUEST, f"images: {line}") from error


def joined(ids: list[int], parts: Sequence[Any]) -> Any:  # noqa: ANN401 -- MultimodalProcessorOutput
    """Return the input of a prompt that has the images of `parts`, each written alone by SGLang's
    processor. Raises ValueError.
    """
    items, token = [item for part in parts for item in part.mm_items], parts[0].im_token_id
    runs = [run for item in items for run in item.offsets]
    contents = [part.input_ids[a : b + 1] for part, (a, b) in zip(parts, runs, strict=False)]
    if len(runs) != len(parts) or any({*content} != {token} for content in contents):
        raise ValueError("the model's processor does not repeat a placeholder for an image")
    starts = starts_of(ids, contents)
    rest = contents[len(starts) :]
    end = starts[-1] + len(contents[len(starts) - 1]) if starts else 0
    places = [place for place in range(end, len(ids)) if ids[place] == token] if rest else []
    if len(places) != len(rest):
        raise ValueError(
            f"the prompt has {len(starts) + len(places)} places for its {len(parts)} images, or "
            "not the tokens that the model's processor writes for them"
        )
    whole = ids[:end]
    for place, content in zip(places, rest, strict=True):
        whole += ids[end:place]
        starts.append(len(whole))
        whole += content
        end = place + 1
    whole += ids[end:]
    for item, start, content in zip(items, starts, contents, strict=True):
        item.offsets = [(start, start + len(content) - 1)]
    positions = delta = None
    if parts[0].mrope_positions is not None:
        of_parts = zip(parts, runs, strict=True)
        blocks = [part.mrope_positions[:, a : b + 1] for part, (a, b) in of_parts]
        positions = _positions(len(whole), starts, blocks)
        delta = (positions.max() + 1 - len(whole)).reshape(1, 1)
    return structs.replace(
        parts[0],
        mm_items=items,
        input_ids=whole,
        padded_input_ids=None,
        mrope_positions=positions,
        mrope_position_delta=delta,
    )


def _positions(
    length: int, starts: Sequence[int], blocks: Sequence["torch.Tensor"]
) -> "torch.Tensor":
    """Return the rotary positions of a prompt, of shape (3, length): each image's own, `blocks`,
    among those of text, which go on after the largest one so far.
    """
    import torch

    found, end, number = [], 0, 0
    for start, block in zip([*starts, length], [*blocks, blocks[0][:, :0]], strict=True):
        found.append(torch.arange(number, number + start - end).expand(3, -1))
        number += start - end
        end = start + block.shape[1]
        if end > start:
            found.append(block - block.min() + number)
            number = int(found[-1].max()) + 1
    return torch.cat(found, dim=1)
