"""A child that speaks JSON lines: commands go down its stdin, events come up its stdout."""

import asyncio
import json
from typing import Any

from rose.errors import RoseError, UnavailableError
from rose.process import ManagedProcess, ProcessSpec

MAX_WAITING_EVENTS = 10_000


class Talker:
    """The trainer or the load generator, seen from the demo."""

    def __init__(self, process: ManagedProcess) -> None:
        self.process = process
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue(maxsize=MAX_WAITING_EVENTS)
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, spec: ProcessSpec) -> "Talker":
        """Start the child with pipes."""
        return cls(await ManagedProcess.start(spec))

    async def say(self, **command: object) -> None:
        """Send one command; a child that is gone takes none."""
        if self.process.returncode is not None:
            return
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        await self.process.stdin.drain()

    async def next(self) -> dict[str, Any]:
        """The next event. Raises RoseError for an error event and for an unexpected end."""
        event = await self.events.get()
        if event["event"] == "error":
            raise RoseError(f"{self.process.spec.name}: {event.get('message')}")
        return event

    async def expect(self, name: str, timeout_s: float) -> dict[str, Any]:
        """Skip events until one of this name; UnavailableError when it does not come in time."""
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
            # Also of a line that is longer or deeper than any event.
            message = f"said what is no event ({error}); see {self.process.spec.log}"
            await self.events.put({"event": "error", "message": message})
            return
        code = await self.process.wait()
        message = f"ended (exit {code}); see {self.process.spec.log}"
        await self.events.put({"event": "end" if code == 0 else "error", "message": message})
