"""A page as it is rendered: its HTML, its cells by id, and a digest of its structure.

    template ──cell(id, text, …)──► HTML, and the cell's record ──► message of what changed

Every text that may change is a cell with an id, made of its block and its place, never of a name
from outside. Two renderings of one `structure` differ in cells alone, so a browser that shows the
one comes to the other by the cells that differ. Everything is escaped: names, reasons and labels
come from outside. A message has texts alone, which scripts set as text and never as HTML.
"""

import datetime
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Final, Literal, TypeAlias
from urllib.parse import urlencode

import jinja2
from markupsafe import Markup, escape

TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
Tone: TypeAlias = Literal["", "good", "warn", "bad", "quiet"]
"""Colour of a cell, whose text says the same: colour is never alone."""
NO_DATA: Final = "no data"
_SIZES: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_HEAD, _HEAD_END = Markup('<th scope="row">'), Markup("</th>")
_CELL_END = Markup("</td>")
_CELLS: Final = {kind: Markup(f'<td class="{kind}">') for kind in ("n", "wide", "n wide")}  # noqa: S704
_CELLS[""] = Markup("<td>")


@dataclass(frozen=True, slots=True)
class Cell:
    """Text of a page that may change. href: its link. hint: text shown beside the pointer.

    tone: colour. value: length of a part of a bar.
    """

    text: str
    tone: Tone = ""
    href: str = ""
    hint: str = ""
    value: float | None = None

    def html(self, name: str) -> Markup:
        """Return the cell as an HTML element with this id."""
        begin, end = (f'<a href="{escape(self.href)}"', "a") if self.href else ("<span", "span")
        tone = f' class="{self.tone}"' if self.tone else ""
        hint = f' title="{escape(self.hint)}"' if self.hint else ""
        # All parts are escaped here: `Markup.format` takes ten times as long.
        return Markup(f'{begin} id="{name}"{tone}{hint}>{escape(self.text)}</{end}>')  # noqa: S704


class RowBuilder:
    """Row of a table, or list of labels, that a template fills cell by cell."""

    def __init__(self, page: "Page | None", key: str, columns: tuple[str, ...] = ()) -> None:
        """Begin a row. page: records the cells, None for cells that never change.

        key: prefix of the cells' ids. columns: CSS classes of the columns.
        """
        self._page, self._key, self._columns = page, key, columns
        self._at = 0

    def cell(
        self, text: object, tone: Tone = "", href: str = "", hint: str = "", name: str = ""
    ) -> Markup:
        """Return the HTML of the row's next cell, and record the cell in the page.

        name: name of the row, given with its first cell.
        """
        at, made = self._next(text, tone, href, hint)
        if not at and self._page is not None:
            self._page.mark(name or (text.text if isinstance(text, Cell) else str(text)))
        if not at:
            return _HEAD + made + _HEAD_END
        return _CELLS[self._columns[at]] + made + _CELL_END

    def fact(
        self, label: str, text: object, tone: Tone = "", href: str = "", hint: str = ""
    ) -> Markup:
        """Return the HTML of a label with its cell, and record the cell in the page."""
        if self._page is not None:
            self._page.mark(label)
        _, made = self._next(text, tone, href, hint)
        return Markup("<div><dt>{}</dt><dd>{}</dd></div>\n").format(label, made)

    def _next(self, text: object, tone: Tone, href: str, hint: str) -> tuple[int, Markup]:
        at, self._at = self._at, self._at + 1
        name = f"{self._key}.{at}"
        cell = text if isinstance(text, Cell) else Cell(str(text), tone, href, hint)
        return at, cell.html(name) if self._page is None else self._page.cell(name, cell)


class Page:
    """Page of the dashboard at one moment: its HTML, cells by id, and newest points of its charts.

    at: its address.
    """

    def __init__(self, title: str, at: str, mode: Cell, troubles: tuple[str, ...] = ()) -> None:
        self.title, self.at, self.mode, self.troubles = title, at, mode, troubles
        self.cells: dict[str, Cell] = {}
        # Newest point of each chart.
        self.points: dict[str, tuple[float | None, ...]] = {}
        self._marks = ["troubles", *troubles, at]
        self.html = ""

    def render(self, template: str, at_s: float, cluster: str = "", **context: object) -> "Page":
        """Set the page's HTML from the template; return the page. at_s: Unix time of figures."""
        path = self.at.partition("?")[0]
        here = "/nodes" if path == "/node" else path
        self.html = (
            environment()
            .get_template(template)
            .render(page=self, at_s=at_s, here=here, cluster=cluster, **context)
        )
        return self

    def structure(self) -> str:
        """Return a digest of all but texts, tones and values, the same in every process."""
        links = (f"{name} {cell.href}" for name, cell in self.cells.items())
        digest = hashlib.blake2b(digest_size=8)
        for each in (*self._marks, *links):
            digest.update(each.encode("utf-8", "replace") + b"\0")
        return digest.hexdigest()

    # ---- called by templates ----

    def mark(self, *parts: str) -> str:
        """Add the parts to the page's structure; return "", for templates."""
        self._marks += parts
        return ""

    def cell(
        self, name: str, text: object, tone: Tone = "", href: str = "", hint: str = ""
    ) -> Markup:
        """Record a cell with this id, and return its HTML."""
        cell = text if isinstance(text, Cell) else Cell(str(text), tone, href, hint)
        self.cells[name] = cell
        return cell.html(name)

    def row(self, key: str, columns: tuple[str, ...] = (), *, changes: bool = True) -> RowBuilder:
        """Return the builder of a table's row or a list of labels; changes: record its cells."""
        return RowBuilder(self if changes else None, key, columns)

    def chart(self, key: str) -> str:
        """Record a chart, whose newest point is set later; return "", for templates."""
        self.points[key] = (None,)
        return self.mark(key)


def message_of(page: Page, before: Mapping[str, Cell], at_s: float) -> bytes:
    """Return a server-sent message with the cells that differ from `before`, a browser's cells.

    s: structure; a browser with another structure ignores the cells and loads the page. t: time. c:
    cells by id: text, tone, hint, value. p: the newest point of each chart.
    """
    changed = {
        name: [cell.text, cell.tone, cell.hint, cell.value]
        for name, cell in page.cells.items()
        if before.get(name) != cell
    }
    content = {"s": page.structure(), "t": day(at_s), "c": changed, "p": page.points}
    return f"data: {json.dumps(content, separators=(',', ':'), allow_nan=False)}\n\n".encode()


def spans(values: list[float]) -> list[tuple[float, float]]:
    """Return begin and width of each part of a bar, in percent of the whole."""
    whole, begin, found = sum(values) or 1.0, 0.0, []
    for value in values:
        width = 100 * value / whole
        found.append((round(begin, 3), round(width, 3)))
        begin += width
    return found


def url(path: str, **query: str | int) -> str:
    """Return an address with the query's fields that are not empty.

    Names from outside are in its query alone.
    """
    asked = {name: value for name, value in query.items() if value not in ("", None)}
    return f"{path}?{urlencode(asked, errors='replace')}" if asked else path


@cache
def assets() -> Mapping[str, tuple[bytes, str]]:
    """Return the static files as (bytes, content type) by name; the result is cached."""
    folder = resources.files(__package__) / "static"
    return {
        each.name: (each.read_bytes(), TYPES[each.name.rpartition(".")[2]])
        for each in folder.iterdir()
        if each.name.rpartition(".")[2] in TYPES
    }


@cache
def asset(name: str) -> str:
    """Return a static file's address, with a digest of its bytes so that browsers keep it."""
    return f"/static/{name}?v={hashlib.blake2b(assets()[name][0], digest_size=6).hexdigest()}"


@cache
def environment() -> jinja2.Environment:
    """Return the templates' Jinja environment, with figures' formats as filters; cached."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader(__package__, "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    made.filters |= {each.__name__: each for each in (size, share, count, latency, span, day)}
    made.globals |= {"asset": asset, "url": url, "spans": spans, "NO_DATA": NO_DATA}
    return made


# ---- figures as texts, each with its unit; an unknown one is `no data`, never 0 ----


def size(count: float | None) -> str:
    """Return bytes as text: `38.0 GiB`; `no data` for None."""
    if count is None:
        return NO_DATA
    power = 0
    while count >= 1024 and power < len(_SIZES) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f} B" if power == 0 else f"{count:.1f} {_SIZES[power]}"


def share(part: float | None) -> str:
    """Return a share as text: `61%`; `no data` for None."""
    return NO_DATA if part is None else f"{part:.0%}"


def count(number: float | None) -> str:
    """Return a number as text, with a space between thousands; `no data` for None."""
    return NO_DATA if number is None else f"{number:,.0f}".replace(",", " ")


def latency(seconds: float | None) -> str:
    """Return a latency as text: `420 ms`, `1.30 s`; `no data` for None."""
    if seconds is None:
        return NO_DATA
    if seconds < 0.01:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def span(seconds: float | None) -> str:
    """Return a duration as text: `3 s`, `5 min`, `2.1 h`, `4.0 d`; `no data` for None."""
    if seconds is None:
        return NO_DATA
    for least, unit, each in ((172_800.0, "d", 86_400.0), (7_200.0, "h", 3_600.0)):
        if seconds >= least:
            return f"{seconds / each:.1f} {unit}"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


def day(at_s: float) -> str:
    """Return a Unix time as text: `2026-11-23 11:35:02 UTC`."""
    return f"{datetime.datetime.fromtimestamp(at_s, datetime.UTC):%Y-%m-%d %H:%M:%S} UTC"
