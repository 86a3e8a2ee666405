"""Pictures of the dashboard, and of the page of `rose advise`, for the docs.

`python -m tests.engine.operators.dashboard_pictures [FOLDER | PAGE]`: into docs/_static without a
folder; with one, all pages in light, dark and on a phone are put there. With a page of `rose advise
--out`, that alone goes to docs/_static.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.engine.operators.test_dashboard import NODES, PAGES, ROOT, standin
from tests.harness.programs.chromium import Tab, chromium

LIVE = "document.getElementById('live').textContent === 'live'"
DRAWN = "document.querySelectorAll('figure .plot[hidden]').length === 0"


async def shown(tab: Tab, url: str) -> None:
    await tab.open(url)
    await tab.until(LIVE)
    await tab.until(DRAWN)


async def of_the_docs(folder: Path, scratch: Path) -> None:
    async with standin(NODES) as served, chromium(scratch) as tab:
        await tab.show(width=1_280, height=900)
        await asyncio.sleep(20)  # charts need something to show
        await shown(tab, served.url)
        (folder / "dashboard.png").write_bytes(await tab.picture())
        await tab.show(width=390, height=844, phone=True)
        await shown(tab, served.url)
        (folder / "dashboard-phone.png").write_bytes(await tab.picture())
    async with standin(40) as served, chromium(scratch / "2") as tab:
        await tab.show(width=1_280, height=1_250, dark=True)
        await shown(tab, f"{served.url}/node?name=serving-0004")
        (folder / "dashboard-node.png").write_bytes(await tab.picture())


async def of_advice(page: Path, folder: Path, scratch: Path) -> None:
    async with chromium(scratch) as tab:
        await tab.show(width=1_000, height=900)
        await tab.open(page.as_uri())
        (folder / "advice.png").write_bytes(await tab.picture(whole=True))


async def of_everything(folder: Path, scratch: Path) -> None:
    async with standin(40) as served, chromium(scratch) as tab:
        for name, width, dark in (
            ("light", 1_280, False),
            ("dark", 1_280, True),
            ("phone", 360, True),
        ):
            await tab.show(width=width, height=900, dark=dark, phone=width < 500)
            for page in PAGES:
                await shown(tab, served.url + page)
                file = f"{name}-{page.partition('?')[0].strip('/') or 'front'}.png"
                (folder / file).write_bytes(await tab.picture(whole=True))
        await served.obey("standby")
        await tab.until("document.getElementById('panel-standby') !== null")
        (folder / "standby.png").write_bytes(await tab.picture())


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "2").mkdir()
        docs = ROOT / "docs" / "_static"
        if len(sys.argv) > 1 and sys.argv[1].endswith(".html"):
            asyncio.run(of_advice(Path(sys.argv[1]).resolve(), docs, Path(scratch)))
        elif len(sys.argv) > 1:
            folder = Path(sys.argv[1])
            folder.mkdir(parents=True, exist_ok=True)
            asyncio.run(of_everything(folder, Path(scratch)))
        else:
            asyncio.run(of_the_docs(docs, Path(scratch)))


if __name__ == "__main__":
    main()
