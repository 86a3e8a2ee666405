"""Front and back of a benchmark's command: its parser, its errors, its verdict, its files."""

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


def parser_of(
    doc: str | None, prog: str, out: Path | None = None, **numbers: float
) -> argparse.ArgumentParser:
    """Return a parser whose help is a module's docstring, with an option for each of `numbers`.

    out: folder of the results unless `--out` names another; None where they are one file.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=out, metavar="DIR" if out else "FILE")
    for name, usual in numbers.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=type(usual),
            default=usual,
            metavar="N" if isinstance(usual, int) else "X",
            help="default %(default)s",
        )
    return parser


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


def put_judged(
    result: Mapping[str, object], out: Path | None, *, good: bool, shown: bool = True
) -> int:
    """Write a result, with this machine, as `put` does; return exit code 0, or 1 unless good."""
    put({"machine": machine(), **result}, out, shown=shown)
    return int(not good)


def put_both(folder: Path, name: str, result: Mapping[str, object], text: str) -> None:
    """Write NAME.json and NAME.txt to a folder, and the text to standard output."""
    put(result, folder / f"{name}.json", shown=False)
    (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
