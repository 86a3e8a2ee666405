"""Connections of a server that is fuzzed without sockets."""

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any

from rose.process.http_port import Connection

STEPS = 40


class FuzzTransport(asyncio.Transport):
    """A connection that is read by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.closed = False

    def write(self, data: Any) -> None:
        self.sent += data

    def writelines(self, list_of_data: Any) -> None:
        self.sent += b"".join(list_of_data)

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Nothing more comes anyway."""

    def resume_reading(self) -> None:
        """Nothing more comes anyway."""


class Wire:
    """Connections of a server, without sockets."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect

    async def sent_for(self, data: bytes) -> bytes:
        """Return all that the server answers."""
        transport = FuzzTransport()
        connection = self._connect()
        connection.connection_made(transport)
        connection.data_received(data)
        await _steps(connection, transport)
        connection.connection_lost(None)
        await asyncio.sleep(0)
        return bytes(transport.sent)


def answers_of(sent: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield status and body of each answer; nothing else was sent."""
    while sent.startswith(b"HTTP/"):
        head, _, rest = sent.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        length = re.search(rb"\r\ncontent-length: (\d+)", head, re.IGNORECASE)
        size = int(length[1]) if length else 0
        body, sent = rest[:size], rest[size:]
        if status != 100:
            yield status, body
    assert not sent, sent[:200]


async def _steps(connection: Connection, transport: FuzzTransport) -> None:
    for _ in range(STEPS):
        await asyncio.sleep(0)
        if transport.closed:
            return
    assert connection.transport is transport
