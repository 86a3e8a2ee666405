"""Headless Chromium, driven over its DevTools protocol, where it is installed."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.harness.waiting import PATIENCE_S

NAMES = ("chromium", "chromium-browser", "google-chrome")


def _found() -> str | None:
    """A program: the one that ROSE_CHROMIUM names, on the PATH, or where the script puts it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    fetched = shutil.which(cache / "rose-chromium" / "chromium")
    return os.environ.get("ROSE_CHROMIUM") or next(
        filter(None, (*map(shutil.which, NAMES), fetched)), None
    )


PROGRAM = _found()
needs_chromium = pytest.mark.skipif(
    PROGRAM is None,
    reason="needs Chromium: `scripts/chromium` fetches it, ROSE_CHROMIUM=PROGRAM names it",
)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-extensions",
    "--disable-component-update",
    "--disable-background-networking",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


class Tab:
    """One tab. complaints: errors and warnings of its console, exceptions, what CSP blocked."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._events: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._reader = asyncio.create_task(self._read())
        self.complaints: list[str] = []
        self.sent_bytes = self.content_bytes = 0

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        """One call of the protocol."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(PATIENCE_S):
            said = await answer
        assert "error" not in said, f"{method}: {said['error']}"
        return dict(said["result"])

    async def run(self, script: str) -> Any:
        """The value of a script's expression; a promise is awaited."""
        said = await self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    async def open(self, url: str) -> None:
        """Load a page from the network, and wait until all that it names is there."""
        self.sent_bytes = self.content_bytes = 0
        loaded = self._events["Page.loadEventFired"]
        loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(PATIENCE_S):
            await loaded.wait()

    async def until(self, script: str) -> Any:
        """Wait until an expression is true of the page; its value."""
        async with asyncio.timeout(PATIENCE_S):
            while not (value := await self.run(script)):  # noqa: ASYNC110 - it is a browser's
                await asyncio.sleep(0.02)
        return value

    async def show(
        self, *, width: int, height: int, dark: bool = False, phone: bool = False
    ) -> None:
        """Pretend to be a screen of that size, whose reader likes it light or dark."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, *, whole: bool = False) -> bytes:
        """A PNG of what is shown, or of the whole page."""
        painted = "new Promise((seen) => requestAnimationFrame(() => requestAnimationFrame(seen)))"
        await self.call("Runtime.evaluate", expression=painted, awaitPromise=True)
        said = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(said["data"])

    async def end(self) -> None:
        self._reader.cancel()
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            else:
                self._hear(said["method"], said["params"])

    def _hear(self, event: str, params: Mapping[str, Any]) -> None:
        if event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(params["args"]))
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event == "Network.dataReceived":
            self.content_bytes += params["dataLength"]
        elif event == "Network.loadingFinished":
            self.sent_bytes += int(params["encodedDataLength"])
        self._events[event].set()


@contextlib.asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Tab]:
    """A browser of its own in that folder, with one tab."""
    assert PROGRAM is not None
    profile = folder / "profile"
    log = folder / "chromium.log"
    with log.open("wb") as said:
        process = await asyncio.create_subprocess_exec(
            PROGRAM,
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=said,
            env={"HOME": str(folder), "PATH": "/usr/bin:/bin"},
        )
    try:
        where = profile / "DevToolsActivePort"
        async with asyncio.timeout(PATIENCE_S):
            while not (where.exists() and where.read_text().count("\n")):
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.02)
        port = int(where.read_text().split("\n")[0])
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                pages = [each for each in await answer.json() if each["type"] == "page"]
            address = pages[0]["webSocketDebuggerUrl"]
            async with session.ws_connect(address, max_msg_size=0) as socket:
                tab = Tab(socket)
                for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
                    await tab.call(f"{domain}.enable")
                yield tab
                await tab.end()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()
