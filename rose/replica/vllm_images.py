"""Images in vLLM's prompts: each is there as the tokens that the model's processor writes for it.

    prompt         5 <image> 7 9      5 F F F F 7 9    <image>: placeholder, F: tokens of the image
                       │ expanded         │ found
    engine input   5 F F F F 7 9      5 F F F F 7 9

A trainer's processor writes the second form, a chat template the first one. A turn that goes on is
in the second form: a policy may sample a placeholder, which is no place of an image.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from PIL.Image import DecompressionBombError
from vllm.inputs.engine import mm_input
from vllm.multimodal.inputs import PlaceholderRange
from vllm.multimodal.media.image import ImageMediaIO

from rose.images import Image, starts_of
from rose.replica.engine import BAD_REQUEST, RequestRefusedError
from rose.replica.token_versions import KvStaleness

_FAILURES = (
    ValueError,
    AssertionError,
    OSError,
    RuntimeError,
    TypeError,
    DecompressionBombError,
)


def why_none(engine: Any) -> str:  # noqa: ANN401 - vLLM's AsyncLLM
    """Return the reason why the engine takes no images, "" if it does."""
    processor = engine.renderer.mm_processor if engine.model_config.is_multimodal_model else None
    if processor is None:
        return "images: the engine's model takes none"
    allowed = processor.info.allowed_mm_limits.get("image", 0)
    return "" if allowed else "images: the engine's --limit-mm-per-prompt allows none"


async def image_input(
    engine: Any,  # noqa: ANN401 - vLLM's AsyncLLM
    token_ids: list[int],
    images: Sequence[Image],
) -> Any:  # noqa: ANN401 - vLLM's MultiModalInput
    """Return the engine's input of a prompt with images. Raises RequestRefusedError.

    vLLM's processor runs once for each image: its results are cached by the images' hashes.
    """
    try:
        decode = ImageMediaIO().load_bytes
        media = [await asyncio.to_thread(decode, image.data) for image in images]
        names = [image.sha256 for image in images]
        rendered = await _rendered(engine, token_ids, media, names)
        places = rendered["mm_placeholders"]["image"]
        ids = rendered["prompt_token_ids"]
        contents = [ids[place.offset : place.offset + place.length] for place in places]
        starts = starts_of(token_ids, contents)
        count = len(starts)
        if count < len(images):
            begin = starts[-1] + len(contents[count - 1]) if count else 0
            rest, tail = token_ids[begin:], rendered
            if count:
                tail = await _rendered(engine, rest, media[count:], names[count:])
            _check_places(rest, tail)
            token_ids = [*token_ids[:begin], *tail["prompt_token_ids"]]
            starts += [begin + place.offset for place in tail["mm_placeholders"]["image"]]
    except _FAILURES as error:
        line = (str(error) or type(error).__name__).splitlines()[0]
        raise RequestRefusedError(BAD_REQUEST, f"images: {line}") from error
    ranges = [
        PlaceholderRange(offset=start, length=place.length, is_embed=place.is_embed)
        for start, place in zip(starts, places, strict=True)
    ]
    return mm_input(token_ids, rendered["mm_kwargs"], {"image": names}, {"image": ranges})


def stamp(prompt: Any, ages: KvStaleness, salt: str | None) -> None:  # noqa: ANN401 - its MultiModalInput
    """Set the cache salt of a turn that begins now, and of its images: an encoder's output of older
    weights is reused no more than their KV is.
    """
    names = prompt["mm_hashes"]["image"]
    prompt["mm_hashes"] = {"image": [ages.salted(name) for name in names]}
    if salt is not None:
        prompt["cache_salt"] = salt


async def _rendered(engine: Any, ids: list[int], media: Sequence[Any], names: list[str]) -> Any:  # noqa: ANN401 - vLLM's own
    asked = {
        "prompt_token_ids": ids,
        "multi_modal_data": {"image": [*media]},
        "multi_modal_uuids": {"image": names},
    }
    # The engine's own cache is cleared by updates, perhaps while this runs.
    (made,) = await engine.renderer.render_cmpl_async([asked], skip_mm_cache=True)
    return made


def _check_places(ids: list[int], rendered: Any) -> None:  # noqa: ANN401 - vLLM's MultiModalInput
    """Raise ValueError if a prompt has more placeholders than images, or tokens of an image that
    are not those of this processor.
    """
    places = rendered["mm_placeholders"]["image"]
    added = len(rendered["prompt_token_ids"]) - len(ids)
    size, odd = divmod(sum(place.length for place in places) - added, len(places))
    first = places[0].offset
    if odd or not size:
        return
    found = starts_of(ids, [ids[first : first + size]] * (len(places) + 1))
    if len(found) > len(places):
        raise ValueError(
            f"the prompt has places of more than its {len(places)} images, or not the tokens that "
            "the model's processor writes for them"
        )
