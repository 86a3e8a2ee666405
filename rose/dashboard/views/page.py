"""Elements of a page: panels of facts, bars, tables and charts, down to single cells.

Every text that may change is a cell with an id, made of its block and its place, never of a name
from outside. Two renderings of a page with one `structure` differ in texts alone, so a browser that
shows the one comes to the other by the cells that differ.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

Tone: TypeAlias = Literal["", "good", "warn", "bad", "quiet"]
"""Colour of a cell, whose text says the same: colour is never alone."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A text. href: where it leads; hint: shown beside the pointer; value: of a part of a bar."""

    text: str
    tone: Tone = ""
    href: str = ""
    hint: str = ""
    value: float | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """A list of labels, each with a cell."""

    key: str
    facts: tuple[tuple[str, Cell], ...]
    kind: Literal["facts"] = "facts"


@dataclass(frozen=True, slots=True)
class Bar:
    """Shares of a whole, each with its label and number."""

    key: str
    label: str
    parts: tuple[tuple[str, Cell], ...]
    kind: Literal["bar"] = "bar"

    @property
    def spans(self) -> list[tuple[float, float, Tone]]:
        """Begin, width and tone of each part, in hundredths of the whole."""
        values = [cell.value or 0.0 for _, cell in self.parts]
        whole, begin, found = sum(values) or 1.0, 0.0, list[tuple[float, float, Tone]]()
        for (_, cell), value in zip(self.parts, values, strict=True):
            width = 100 * value / whole
            found.append((round(begin, 3), round(width, 3), cell.tone))
            begin += width
        return found


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table; number: its texts are aligned as figures."""

    label: str
    number: bool = False
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A row; name says which one it is, where others stand in its place the page is another one."""

    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table; empty: what is said in the place of rows. Its first column names the row."""

    key: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    empty: str
    kind: Literal["table"] = "table"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart. scale: lines of one scale share an axis; target: drawn dashed."""

    label: str
    scale: str
    color: str
    target: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart over time: scripts draw it from `source`; `figures` say the same without them."""

    key: str
    title: str
    source: str
    lines: tuple[Line, ...]
    newest: tuple[float | None, ...]
    figures: Table
    kind: Literal["chart"] = "chart"


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence."""

    key: str
    cell: Cell
    kind: Literal["note"] = "note"


@dataclass(frozen=True, slots=True)
class Search:
    """A form that asks for the page again; fields: name, label, value, and choices if not free."""

    action: str
    fields: tuple[tuple[str, str, str, tuple[str, ...]], ...]
    kind: Literal["search"] = "search"


@dataclass(frozen=True, slots=True)
class Pager:
    """Links to the other parts of a long table."""

    label: str
    said: str
    before: str = ""
    after: str = ""
    kind: Literal["pager"] = "pager"


Block: TypeAlias = Facts | Bar | Table | Chart | Note | Search | Pager


@dataclass(frozen=True, slots=True)
class Panel:
    """Blocks that answer one question."""

    key: str
    title: str
    question: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """A whole page. at: its address; mode: what the top says; troubles: of the process."""

    title: str
    at: str
    mode: Cell
    panels: tuple[Panel, ...]
    troubles: tuple[str, ...] = ()

    @property
    def charts(self) -> list[Chart]:
        """All charts of the page."""
        return [
            block for panel in self.panels for block in panel.blocks if isinstance(block, Chart)
        ]

    def cells(self) -> dict[str, Cell]:
        """Each cell by its id."""
        found = {"mode": self.mode}
        for panel in self.panels:
            for block in panel.blocks:
                found.update(_cells_of(block))
        return found

    def structure(self) -> str:
        """A digest of everything but texts, tones and values of cells, the same in every life."""
        digest = hashlib.blake2b(digest_size=8)
        for text in self._skeleton():
            digest.update(text.encode("utf-8", "replace") + b"\0")
        return digest.hexdigest()

    def _skeleton(self) -> Iterator[str]:
        yield from ("troubles", *self.troubles, self.at)
        for panel in self.panels:
            yield panel.key
            for block in panel.blocks:
                yield from _skeleton_of(block)
        for name, cell in self.cells().items():
            yield f"{name} {cell.href}"


def _cells_of(block: Block) -> Iterator[tuple[str, Cell]]:
    match block:
        case Facts(key, facts) | Bar(key, _, facts):
            for number, (_, cell) in enumerate(facts):
                yield f"{key}.{number}", cell
        case Note(key, cell):
            yield key, cell
        case Table(key, rows=rows):
            for number, row in enumerate(rows):
                for column, cell in enumerate(row.cells):
                    yield f"{key}.{number}.{column}", cell
        case Chart() | Search() | Pager():
            return


def _skeleton_of(block: Block) -> Iterator[str]:
    match block:
        case Facts(key, facts) | Bar(key, _, facts):
            yield from (key, *(label for label, _ in facts))
        case Table(key, rows=rows):
            yield from (key, *(row.name for row in rows))
        case Pager(_, said):
            yield said
        case Chart(key):
            yield key
        case Note() | Search():
            return
