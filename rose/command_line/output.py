"""Output of commands: tables, JSON or YAML, once or repeatedly.

    read ──► View(data, lines, tables) ──► -o table   lines, then tables, for a person
                                       ──► -o json    data: the read model's fields
                                       ──► -o yaml    the same

On a terminal tables are cut to its width and coloured (NO_COLOR is obeyed). In a pipe nothing is
cut, coloured or padded. With --watch a terminal shows the newest view alone; a pipe gets one view
after the other, a line each in JSON, a document each in YAML.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import msgspec
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from rose.errors import UnavailableError

# Wider than any table, so that in a pipe no cell is cut.
PIPE_WIDTH: Final = 1_000_000
GAP: Final = 2
# A narrower column cannot be read.
READABLE: Final = 16
WATCH_S: Final = 2.0


class Format(StrEnum):
    """Format of a command's output."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class Tone(StrEnum):
    """Colour of a text on a terminal; the text alone says the same."""

    PLAIN = ""
    GOOD = "green"
    CARE = "yellow"
    BAD = "bold red"
    FAINT = "dim"
    HEAD = "bold"


@dataclass(frozen=True, slots=True)
class TonedText:
    """Text with a colour."""

    text: str
    tone: Tone = Tone.PLAIN

    def __str__(self) -> str:
        return self.text


Said = TonedText | str


@dataclass(frozen=True, slots=True)
class Table:
    """Table of texts, omitted if it has no rows. right: names of right-aligned columns.

    spare: columns that a narrow terminal leaves out, the first one first.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[Said, ...], ...]
    title: str = ""
    right: frozenset[str] = frozenset()
    spare: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class View:
    """Result of a command: data for JSON and YAML, lines and tables for people."""

    data: object
    lines: tuple[Said, ...] = ()
    tables: tuple[Table, ...] = field(default=())


def add_output_options(
    parser: argparse.ArgumentParser, *, watch: bool = False, more: Sequence[str] = ()
) -> None:
    """Add `-o`, and for commands that can be repeated `--watch`, to a parser.

    more: further formats, which the command writes itself.
    """
    parser.add_argument(
        "-o",
        "--output",
        choices=[*(each.value for each in Format), *more],
        default=Format.TABLE.value,
        help="how it is written (default table)",
    )
    if watch:
        parser.add_argument(
            "--watch",
            nargs="?",
            type=_pause_s,
            const=WATCH_S,
            metavar="SECONDS",
            help=f"again and again, every so many seconds (default {WATCH_S:g}); Ctrl-C ends it",
        )


def _pause_s(text: str) -> float:
    seconds = float(text)
    if not 0.1 <= seconds <= 3_600:
        raise argparse.ArgumentTypeError(f"{text} is no pause of 0.1 to 3600 s")
    return seconds


def show(
    args: argparse.Namespace, read: Callable[[], View], sleep: Callable[[float], None] = time.sleep
) -> None:
    """Print the view that `read` returns, in the chosen format; with --watch repeatedly until
    Ctrl-C.

    An error of the first read is raised; UnavailableError of a later one is shown, and the read is
    repeated.
    """
    form = Format(args.output)
    every_s: float | None = getattr(args, "watch", None)
    if every_s is None:
        write(read(), form)
    elif form is Format.TABLE and sys.stdout.isatty():
        live(lambda height: rendered(read()), every_s, sleep)
    else:
        _stream(read, form, every_s, sleep)


def write(view: View, form: Format = Format.TABLE) -> None:
    """Print one view to standard output in a format."""
    sys.stdout.write(_text(view, form))
    sys.stdout.flush()


def say(*lines: str) -> None:
    """Print lines to standard output."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def note(line: str) -> None:
    """Print a line to standard error, where it is no part of the output that scripts read."""
    sys.stderr.write(f"rose: {line}\n")


def _text(view: View, form: Format) -> str:
    match form:
        case Format.JSON:
            plain = msgspec.json.encode(view.data)
            return msgspec.json.format(plain, indent=2).decode() + "\n"
        case Format.YAML:
            return msgspec.yaml.encode(view.data).decode()
        case Format.TABLE:
            return text_of(rendered(view))


def text_of(drawn: RenderableType) -> str:
    """Return a drawing as the text that would be printed: cut and coloured on a terminal, whole and
    plain in a pipe.
    """
    console = console_of()
    with console.capture() as taken:
        console.print(drawn)
    return "".join(f"{line.rstrip()}\n" for line in taken.get().splitlines())


def console_of() -> Console:
    """Return a console on standard output that is as wide as the terminal, or in a pipe wider than
    any table.
    """
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=PIPE_WIDTH, highlight=False)


def rendered(view: View) -> Group:
    """Return the drawing of a view for a console: its lines, then its tables that have rows."""
    parts: list[RenderableType] = [_styled(line) for line in view.lines]
    for table in view.tables:
        if table.rows:
            if parts:
                parts.append(Text(""))
            parts.append(_Drawn(table))
    return Group(*parts)


def _styled(said: Said) -> Text:
    return Text(said.text, style=said.tone.value) if isinstance(said, TonedText) else Text(said)


def _cut(said: Said, width: int) -> Text:
    """Return a cell's text, cut after a word where it is wider than its column."""
    text = _styled(said)
    if text.cell_len > width:
        words = set_cell_size(text.plain, width - 1).rpartition(" ")[0].rstrip(" ,;:")
        if len(words) >= width // 2:
            text.plain = f"{words} …"
    return text


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Drawing of a table on a console, with the columns that `fitted` keeps."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self.table
        if table.title:
            yield Text(table.title, style=Tone.HEAD.value)
        widths, kept = fitted(table, options.max_width)
        drawn = RichTable(
            box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style=Tone.HEAD.value
        )
        for at, width in zip(kept, widths, strict=True):
            name = table.columns[at]
            drawn.add_column(
                name,
                justify="right" if name in table.right else "left",
                no_wrap=True,
                overflow="ellipsis",
                width=width,
            )
        for row in table.rows:
            drawn.add_row(*(_cut(row[at], width) for at, width in zip(kept, widths, strict=True)))
        yield drawn
        if len(kept) < len(table.columns):
            hidden = ", ".join(n for at, n in enumerate(table.columns) if at not in kept)
            yield Text(f"no room for {hidden}", style=Tone.FAINT.value)


def fitted(table: Table, room: int) -> tuple[list[int], list[int]]:
    """Return the widths of the columns that are kept within `room` characters, and their indices.

    The last column, a text, is cut to READABLE at most; then spare columns are left out; then the
    widest are cut to one width.
    """
    natural = [
        max(cell_len(str(cell)) for cell in (name, *(row[at] for row in table.rows)))
        for at, name in enumerate(table.columns)
    ]
    kept = list(range(len(table.columns)))
    spare = list(table.spare)
    while True:
        widths = [natural[at] for at in kept]
        most = room - GAP * (len(kept) - 1)
        text = max(min(READABLE, widths[-1]), most - sum(widths[:-1]))
        widths[-1] = min(widths[-1], text)
        if sum(widths) <= most or not spare:
            cut = max(widths)
            while cut > 1 and sum(min(width, cut) for width in widths) > most:
                cut -= 1
            return [min(width, cut) for width in widths], kept
        name = spare.pop(0)
        kept = [at for at in kept if table.columns[at] != name]


def live(
    draw: Callable[[int], RenderableType],
    every_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Redraw a terminal's screen every `every_s` seconds until Ctrl-C. draw: called with the
    screen's height in lines.

    After UnavailableError the last drawing stays, under the error. The last drawing is printed when
    it ends.
    """
    console = console_of()
    drawn = draw(console.height)
    shown: RenderableType = drawn
    try:
        with Live(console=console, screen=True, auto_refresh=False) as screen:
            while True:
                screen.update(shown, refresh=True)
                sleep(every_s)
                try:
                    shown = drawn = draw(console.height)
                except UnavailableError as error:
                    shown = Group(Text(f"{error}; what was there last:", Tone.BAD.value), drawn)
    finally:
        console.print(drawn)


def _stream(
    read: Callable[[], View], form: Format, every_s: float, sleep: Callable[[float], None]
) -> None:
    view: View | None = read()
    while True:
        if view is not None:
            sys.stdout.write(_document(view, form))
            sys.stdout.flush()
        sleep(every_s)
        try:
            view = read()
        except UnavailableError as error:
            view = None
            note(str(error))


def _document(view: View, form: Format) -> str:
    match form:
        case Format.JSON:
            return msgspec.json.encode(view.data).decode() + "\n"
        case Format.YAML:
            return f"---\n{_text(view, form)}"
        case Format.TABLE:
            return f"{_text(view, form)}\n"


# ---- figures, each written the same everywhere ----

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_of(amount: float | None) -> str:
    """Return an amount of bytes as `38.0 GiB`; `-` if unknown."""
    if amount is None:
        return "-"
    for unit in _UNITS:
        if amount < 1_024 or unit == _UNITS[-1]:
            break
        amount /= 1_024
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"


def share_of(share: float | None) -> str:
    """Return a share as `61%`; `-` if unknown."""
    return "-" if share is None else f"{share:.0%}"


def ago(seconds: float | None) -> str:
    """Return seconds as `4.2 s`, `7 min`, `3 h` or `2 d`; `-` if unknown."""
    if seconds is None:
        return "-"
    for most_s, unit_s, unit in ((60, 1, "s"), (3_600, 60, "min"), (86_400, 3_600, "h")):
        if seconds < most_s:
            digits = 1 if unit == "s" and seconds < 10 else 0
            return f"{seconds / unit_s:.{digits}f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def milliseconds(seconds: float) -> str:
    """Return seconds as `41 ms`, or from a second on as `1.2 s`."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
