"""Images of turns by the hash of their bytes, as gateways and replicas keep them."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Final

_PNG, _JPEG, _GIF = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8"
NOT_AN_IMAGE: Final = "images: send a file of PNG, JPEG, GIF or WebP"


def is_image(data: bytes) -> bool:
    """Return True if the bytes begin as those of a PNG, JPEG, GIF or WebP file do."""
    return data.startswith((_PNG, _JPEG, _GIF)) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")


def starts_of(ids: list[int], contents: Sequence[list[int]]) -> list[int]:
    """Return where the tokens of images begin in `ids`, in order, up to the first image whose
    tokens are not there.
    """
    starts, begin = list[int](), 0
    for content in contents:
        size = len(content)
        while ids[begin : begin + size] != content:
            try:
                begin = ids.index(content[0], begin + 1)
            except ValueError:
                return starts
        starts.append(begin)
        begin += size
    return starts


@dataclass(frozen=True, slots=True)
class Image:
    """Image of a turn; `sha256`: hex digest of the file's bytes, `data`."""

    sha256: str
    data: bytes = field(repr=False)

    @classmethod
    def of(cls, data: bytes) -> "Image":
        """Return the image of these bytes, with their hash."""
        return cls(sha256(data).hexdigest(), data)


class ImageCache:
    """Images of at most `max_bytes` together; above the limit those longest unused are dropped.

    scope: whose image it is; another scope does not find it.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._images: OrderedDict[tuple[str, str], Image] = OrderedDict()
        self.size_bytes = 0

    def add(self, image: Image, scope: str = "") -> Image:
        """Keep an image and return it, or the equal one that is kept already."""
        known = self.find(image.sha256, scope)
        if known is not None:
            return known
        self._images[scope, image.sha256] = image
        self.size_bytes += len(image.data)
        while self.size_bytes > self._max_bytes:
            _, oldest = self._images.popitem(last=False)
            self.size_bytes -= len(oldest.data)
        return image

    def find(self, digest: str, scope: str = "") -> Image | None:
        """Return the image with this hash, used now; None if it is not kept."""
        found = self._images.get((scope, digest))
        if found is not None:
            self._images.move_to_end((scope, digest))
        return found
