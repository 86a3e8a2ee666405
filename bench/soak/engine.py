"""A stand-in engine whose turns fail as their request ids say: `WAY-NUMBER`.

`python -m bench.soak.engine PORT …` serves it in a process of its own.
"""

import asyncio
import re
import sys
from functools import partial

import uvloop

from bench.load.caller import LAST_CHUNK
from bench.load.standin import BATCH, Pace, StandInConnection

# The gateway's name of an attempt is the turn's id, `.copyN` for a second copy, and its number.
_ATTEMPT = re.compile(rb'"request_id":"([a-z_]+)-[^"]*\.(\d+)"')
# Refused by every replica alike.
STATUSES = {b"refused": 400, b"failing": 500}
# The first attempt meets this; the next one, on another replica, goes well.
FIRST_STATUSES = {b"draining": 503, b"faulty": 500}
REVOKED, DIES, SILENT, GARBAGE = b"revoked", b"dies", b"silent", b"garbage"
AFTER_CHUNKS = 2


class FaultyConnection(StandInConnection):
    """One connection; a turn's id decides its end."""

    def _begin(self, body: bytes, path: bytes) -> None:
        named = _ATTEMPT.search(body)
        way, number = (named.group(1), int(named.group(2))) if named else (b"", 0)
        status = STATUSES.get(way) or (FIRST_STATUSES.get(way) if number == 1 else None)
        if status is not None:
            self._transport.write(b"HTTP/1.1 %d No\r\nContent-Length: 2\r\n\r\n{}" % status)
            return
        # A turn that is revoked again and again is whole on its fourth replica.
        again = b"revoked_again"
        self._fault = REVOKED if way == again and number < 4 else way if number == 1 else b""
        self._chunks = 0
        super()._begin(body, path)

    def _chunk(self) -> None:
        self._chunks += 1
        if self._chunks <= AFTER_CHUNKS or self._fault not in (REVOKED, DIES, SILENT, GARBAGE):
            super()._chunk()
            return
        self._timer = None
        if self._fault == REVOKED:
            line, places = b'{"finish_reason":"revoked"}', range(len(self._budgets))
            batch = b"".join(b"[%d,%b]\n" % (place, line) for place in places)
            self._write_line(batch if self._path == BATCH else line + b"\n", LAST_CHUNK)
        elif self._fault == GARBAGE:
            self._write_line(b'{"token_ids": [1, \n')
        elif self._fault == DIES:
            self._transport.abort()

    def _write_line(self, line: bytes, end: bytes = b"") -> None:
        self._transport.write(b"%x\r\n%b\r\n%b" % (len(line), line, end))


async def listen(pace: Pace, port: int = 0) -> asyncio.Server:
    """Serve in this process; port 0 for any."""
    loop = asyncio.get_running_loop()
    make = partial(FaultyConnection, pace, False)
    return await loop.create_server(make, "127.0.0.1", port, backlog=1_024)


async def _serve(ports: list[int]) -> None:
    pace = Pace(0.002, 0.002, 4)
    servers = [await listen(pace, port) for port in ports]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    uvloop.run(_serve([int(port) for port in sys.argv[1:]]))
