"""Images that replicas have: the bytes of each go to a replica once, turns name it by its hash."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from rose.contract.replica import IMAGES
from rose.gateway.backends.http_pool import OK, Upstream
from rose.gateway.errors import fresh
from rose.images import Image

MAX_FAULT_BYTES: Final = 2_048
# Names that are remembered; a replica that was sent an image twice has it once.
MOST_NAMES: Final = 16_384
# Time limit of one image, its connection included.
SEND_S: Final = 20.0
Answer = tuple[int, bytes]


class _Sent:
    """Receiver of the answer to one image; `answer`: status and body."""

    def __init__(self) -> None:
        self._status, self._fault = 0, b""
        self.answer: asyncio.Future[Answer | Exception] = asyncio.get_running_loop().create_future()

    def status(self, code: int) -> None:
        self._status = code

    def body(self, data: bytes) -> None:
        self._fault += data[: MAX_FAULT_BYTES - len(self._fault)]

    def ended(self, error: Exception | None) -> None:
        if not self.answer.done():
            self.answer.set_result((self._status, self._fault) if error is None else fresh(error))


class ImageSender:
    """Sender of images to replicas, each image to each replica once."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        # Done if the replica has the image, else it is being sent.
        self._sent: OrderedDict[tuple[str, str], asyncio.Task[Answer | Exception]] = OrderedDict()

    async def send(self, url: str, images: Sequence[Image]) -> Answer:
        """Send a replica the images that it was not sent yet; return OK, or the status and body of
        the first refusal. Raises OSError if the connection fails.
        """
        for image in images:
            key = url, image.sha256
            task = self._sent.get(key)
            if task is None:
                task = self._sent[key] = asyncio.create_task(self._send(url, image))
                if len(self._sent) > MOST_NAMES:
                    self._sent.popitem(last=False)
            # Others may wait for it too.
            answer = await asyncio.shield(task)
            if not isinstance(answer, Exception) and answer[0] == OK:
                continue
            if self._sent.get(key) is task:
                del self._sent[key]
            if isinstance(answer, Exception):
                raise fresh(answer)
            return answer
        return OK, b""

    def forget(self, url: str) -> None:
        """Forget what a replica was sent: it has dropped an image, or was started anew."""
        for key in [key for key, task in self._sent.items() if key[0] == url and task.done()]:
            del self._sent[key]

    async def _send(self, url: str, image: Image) -> Answer | Exception:
        receiver = _Sent()
        try:
            async with asyncio.timeout(SEND_S):
                connection = await self._upstream.post(url + IMAGES, image.data, receiver)
                try:
                    return await receiver.answer
                finally:
                    connection.leave(receiver)
        except OSError as error:
            return fresh(error)
