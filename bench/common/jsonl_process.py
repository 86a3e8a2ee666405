"""Child that speaks JSON lines: commands on its stdin, events on its stdout."""

import asyncio
import json
from typing import Any

from rose.errors import RoseError, UnavailableError
from rose.process.child import ManagedProcess, ProcessSpec

MAX_WAITING_EVENTS = 10_000


class JsonlProcess:
    """A child that takes commands and reports events as JSON lines."""

    def __init__(self, process: ManagedProcess) -> None:
        self.process = process
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue(maxsize=MAX_WAITING_EVENTS)
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, spec: ProcessSpec) -> "JsonlProcess":
        """Start the child with pipes."""
        return cls(await ManagedProcess.start(spec))

    async def say(self, **command: object) -> None:
        """Send one command; nothing happens if the child is gone."""
        if self.process.returncode is not None:
            return
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        await self.process.stdin.drain()

    async def next(self) -> dict[str, Any]:
        """Return the next event. Raises RoseError for an error event and for an unexpected end."""
        event = await self.events.get()
        if event["event"] == "error":
            raise RoseError(f"{self.process.spec.name}: {event.get('message')}")
        return event

    def check(self) -> None:
        """Raise `RoseError` if the child reported an error or has ended; skip all other events."""
        while not self.events.empty():
            event = self.events.get_nowait()
            if event["event"] == "error":
                raise RoseError(f"{self.process.spec.name}: {event.get('message')}")
        if self.process.returncode is not None:
            raise RoseError(f"{self.process.spec.name} ended; see {self.process.spec.log}")

    async def expect(self, name: str, timeout_s: float) -> dict[str, Any]:
        """Skip events until one of this name. Raises UnavailableError if none comes in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while (event := await self.next())["event"] != name:
                    continue
                return event
        except TimeoutError as error:
            raise UnavailableError(
                f"{self.process.spec.name} did not say {name!r} within {timeout_s:.0f} s;"
                f" see {self.process.spec.log}"
            ) from error

    async def stop(self) -> None:
        """End the child."""
        await self.process.stop()
        self._reader.cancel()

    async def _read(self) -> None:
        try:
            while line := await self.process.stdout.readline():
                await self.events.put(json.loads(line))
        except (ValueError, RecursionError) as error:
            # This also covers a line that is longer or deeper than any event.
            message = f"said what is no event ({error}); see {self.process.spec.log}"
            await self.events.put({"event": "error", "message": message})
            return
        code = await self.process.wait()
        message = f"ended (exit {code}); see {self.process.spec.log}"
        await self.events.put({"event": "end" if code == 0 else "error", "message": message})
