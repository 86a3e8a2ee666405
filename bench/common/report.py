"""Front and back of a benchmark's command: its parser, its errors, its files."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from rose.errors import RoseError

OUT = Path("out/bench")
INK, ALARM = "#22313f", "#c0392b"
DPI = 130
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.edgecolor": "#8a949e",
    "axes.labelcolor": INK,
    "grid.color": "#e6e9ec",
    "font.size": 9,
    "legend.frameon": False,
    "text.color": INK,
    "figure.constrained_layout.use": True,
}
GRID = STYLE | {"axes.grid": True}


def parser_of(doc: str | None, prog: str) -> argparse.ArgumentParser:
    """Return a parser whose help is a module's docstring, as it is written."""
    return argparse.ArgumentParser(
        prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_out_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR")


def reported(prog: str, work: Callable[[], int]) -> int:
    """Return the exit code of `work`; 2, with a line on standard error, for a RoseError."""
    try:
        return work()
    except RoseError as error:
        sys.stderr.write(f"{prog.removeprefix('bench.')}: {error}\n")
        return 2


def machine() -> dict[str, object]:
    """Return the machine that a result names: Python, processor, cores, kernel, load."""
    return {
        "python": platform.python_version(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "load_1min": os.getloadavg()[0],
    }


def say(prog: str, text: str) -> None:
    """Write a line of progress to standard error."""
    sys.stderr.write(f"{prog}: {text}\n")


def as_json(result: object, indent: int = 1) -> str:
    """Return a result of dataclasses, msgspec structs and plain values as JSON text."""
    return json.dumps(msgspec.to_builtins(result, str_keys=True), indent=indent) + "\n"


def put(result: Mapping[str, object], out: Path | None, *, shown: bool = True) -> None:
    """Write a result to a file, which may be in a new folder, and to standard output if `shown`."""
    text = as_json(result)
    if shown:
        sys.stdout.write(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")


def put_both(folder: Path, name: str, result: Mapping[str, object], text: str) -> None:
    """Write NAME.json and NAME.txt to a folder, and the text to standard output."""
    put(result, folder / f"{name}.json", shown=False)
    (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
