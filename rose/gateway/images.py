"""Images of requests: bytes that come once, and hashes that name them afterwards."""

import asyncio
import re
from base64 import b64decode
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import msgspec

from rose.contract.gateway import ImageName
from rose.contract.replica import MAX_IMAGE_BYTES
from rose.errors import BAD_BYTES
from rose.gateway.errors import BadRequest, ImageMissing
from rose.images import NOT_AN_IMAGE, Image, ImageCache, is_image
from rose.security.callers import Caller

MOST_IMAGES: Final = 1_024
# Bytes that are hashed in the event loop, in a fraction of a millisecond.
SHORT_BYTES: Final = 256 << 10
GivenImages = Sequence[bytes | ImageName]


class KeptImages:
    """Images of one gateway's callers, of `max_bytes` together; those longest unused are forgotten.

    owner: returns the job of a caller that names one, and raises TurnError for another's.
    """

    def __init__(self, max_bytes: int, owner: Callable[[Caller, str], str]) -> None:
        self._max_bytes, self._owner = max_bytes, owner
        self._cache = ImageCache(max_bytes)

    async def taken(self, given: GivenImages, caller: Caller, job: str) -> tuple[Image, ...]:
        """Return the images of a request, and keep those that came with their bytes. Raises
        BadRequest, or ImageMissing for a hash of which the job's callers sent no bytes.
        """
        if len(given) > MOST_IMAGES:
            raise BadRequest(f"images: at most {MOST_IMAGES}, got {len(given)}", "images")
        # Neither a job nor a scope has a newline.
        scope = f"{self._owner(caller, job)}\n{caller.scope}"
        found = [await self._image(each, place, scope) for place, each in enumerate(given)]
        return tuple(found)

    async def _image(self, given: bytes | ImageName, place: int, scope: str) -> Image:
        if isinstance(given, ImageName):
            known = self._cache.find(given.sha256, scope)
            if known is None:
                raise ImageMissing(
                    f"images: {given.sha256} is not here: send its bytes (images of all callers "
                    f"have {self._max_bytes} bytes, --images-bytes)",
                    "images",
                )
            return known
        most = min(MAX_IMAGE_BYTES, self._max_bytes)
        if len(given) > most:
            line = f"images: image {place} has {len(given)} bytes, one may have {most}"
            raise BadRequest(line, "images")
        if not is_image(given):
            raise BadRequest(f"{NOT_AN_IMAGE}; image {place} is none", "images")
        short = len(given) <= SHORT_BYTES
        image = Image.of(given) if short else await asyncio.to_thread(Image.of, given)
        return self._cache.add(image, scope)


Part = dict[str, object]
DATA_URL: Final = re.compile(r"data:[\w.+-]+/[\w.+-]+;base64,")
NAMED: Final = "sha256:"


def image_parts(messages: bytes) -> tuple[object, list[Part], list[bytes | ImageName]]:
    """Return the decoded messages of a chat in the form of any of its APIs, the parts in them that
    are images, and those images. Raises BadRequest.

    None and empty lists if there are no images, which is found without decoding.
    """
    if b'"image' not in messages and b'"input_image' not in messages:
        return None, [], []
    try:
        found = msgspec.json.decode(messages)
    except BAD_BYTES:
        # The process that renders them says what is wrong.
        return None, [], []
    contents = [each.get("content") for each in _objects(found)]
    parts = [part for content in contents for part in _objects(content) if _url_of(part)]
    return found, parts, [_given(str(_url_of(part)), place) for place, part in enumerate(parts)]


def name_parts(messages: object, parts: Sequence[Part], images: Sequence[Image]) -> msgspec.Raw:
    """Return the messages as JSON in which these parts name their images by hash alone."""
    for part, image in zip(parts, images, strict=True):
        part.clear()
        part |= {"type": "image", "sha256": image.sha256}
    return msgspec.Raw(msgspec.json.encode(messages))


def _objects(found: object) -> list[Part]:
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _url_of(part: Part) -> object:
    """Return the URL of a part that is an image in one of the APIs, None of another part."""
    kind, url = part.get("type"), part.get("image_url")
    if kind in ("image_url", "input_image"):
        return (url.get("url") if isinstance(url, dict) else url) or "-"
    source = part.get("source")
    if kind == "image" and "sha256" in part:
        return f"{NAMED}{part['sha256']}"
    if kind != "image" or not isinstance(source, dict):
        return None
    if source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    return source.get("url") or "-"


def _given(url: str, place: int) -> bytes | ImageName:
    if url.startswith(NAMED):
        with suppress(msgspec.ValidationError):
            return msgspec.convert({"sha256": url.removeprefix(NAMED)}, ImageName)
    head = DATA_URL.match(url)
    if head is None:
        raise BadRequest(
            f"image_url: image {place} is fetched from nowhere: send a data: URL in base64, or "
            f"{NAMED} and the hash of an image that was sent",
            "image_url",
        )
    try:
        return b64decode(url[head.end() :], validate=True)
    except ValueError as error:
        raise BadRequest(f"image_url: image {place} is no base64: {error}", "image_url") from error
