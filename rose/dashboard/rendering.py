"""Rendering: a page as HTML, and what differs between two of them as a message.

Everything is escaped by the template engine: names, reasons and labels come from outside. The
message has texts alone, which scripts set as text and never as HTML.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Final

import jinja2

from rose.dashboard.text import day
from rose.dashboard.views.page import Cell, Page
from rose.dashboard.views.pages import NAVIGATION

TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
Sent = tuple[str, str, str, str, float | None]


@cache
def assets() -> Mapping[str, tuple[bytes, str]]:
    """Return the static files: bytes and content type by name."""
    folder = resources.files(__package__) / "static"
    return {
        each.name: (each.read_bytes(), TYPES[each.name.rpartition(".")[2]])
        for each in folder.iterdir()
        if each.name.rpartition(".")[2] in TYPES
    }


@cache
def _address(name: str) -> str:
    """An asset's address, another one for other bytes: a browser may keep it for long."""
    return f"/static/{name}?v={hashlib.blake2b(assets()[name][0], digest_size=6).hexdigest()}"


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["day"] = day
    environment.globals["asset"] = _address
    return environment.get_template("page.html")


def html_of(page: Page, at_s: float, cluster: str = "") -> str:
    """The whole page. at_s: Unix seconds, of its figures."""
    path = page.at.partition("?")[0]
    here = "/nodes" if path == "/node" else path
    return _template().render(
        page=page, at_s=at_s, here=here, navigation=NAVIGATION, cluster=cluster
    )


def sent_of(page: Page) -> dict[str, Sent]:
    """Return each cell's state in a browser that shows the page."""
    return {name: _sent(cell) for name, cell in page.cells().items()}


def _sent(cell: Cell) -> Sent:
    return cell.text, cell.tone, cell.hint, cell.href, cell.value


def message_of(page: Page, before: Mapping[str, Sent], at_s: float) -> bytes:
    """A message of `/events`: what to change in a browser that shows `before`.

    s: structure; where it is another one than the browser's, cells are left out and it asks for the
    page. c: cells by id: text, tone, hint, value. p: the newest point of each chart.
    """
    changed = {}
    for name, cell in page.cells().items():
        if before.get(name) != _sent(cell):
            changed[name] = [cell.text, cell.tone, cell.hint, cell.value]
    points = {chart.key: chart.newest for chart in page.charts}
    said = {"s": page.structure(), "t": day(at_s), "c": changed, "p": points}
    return f"data: {json.dumps(said, separators=(',', ':'), allow_nan=False)}\n\n".encode()
