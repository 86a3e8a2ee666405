"""`rose weights diff|apply|inspect|verify`, on safetensors files and on folders of them.

Output is for people or, with `--json`, for programs. Exit code 0 when done, 1 when `verify` found a
difference, 2 for bad input.
"""

import argparse
import errno
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rose.command_line.output import bytes_of, say
from rose.command_line.parser import Parser
from rose.errors import ConfigError
from weight_transfer.errors import WeightError
from weight_transfer.files.apply import Applied, apply_deltas, mismatches
from weight_transfer.files.delta_file import MAGIC, Delta
from weight_transfer.files.delta_writer import DiffSettings, Progress, diff, nothing_told
from weight_transfer.format.checkpoint import Checkpoint
from weight_transfer.format.delta_codec import Level
from weight_transfer.format.manifest import Manifest, TensorUpdate

Report = tuple[dict[str, object], list[str]]
Work = Callable[[argparse.Namespace], tuple[int, Report]]
EXIT_DIFFERS = 1
AUTO = "auto"
_MOST_TENSORS = 12
_MOST_LINES = 20


def delta_report(delta: Delta, model_bytes: int) -> Report:
    """Return the report of `rose weights diff`: a dictionary for --json, and lines for people."""
    plain = _summary(delta) | {"model_bytes": model_bytes}
    share = 100 * delta.nbytes / max(1, model_bytes)
    return plain, [
        f"{delta.path}: {bytes_of(delta.nbytes)}, {share:.2f}% of {bytes_of(model_bytes)}",
        _changes(delta),
    ]


def inspect_report(delta: Delta) -> Report:
    """Return the report of `rose weights inspect` on a delta: a dictionary for --json, and lines
    for people.
    """
    index, fresh = delta.index, frozenset(delta.index.fresh)
    tensors = [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "changed": sum(chunk.changed for chunk in tensor.chunks),
            "encoded_bytes": sum(chunk.encoded_bytes for chunk in tensor.chunks),
            "fresh": tensor.name in fresh,
        }
        for tensor in index.tensors
    ]
    plain = _summary(delta) | {"tensor_list": tensors, "files": [f.path for f in index.files]}
    largest = sorted(index.tensors, key=lambda t: -sum(c.encoded_bytes for c in t.chunks))
    lines = [f"{delta.path}: {bytes_of(delta.nbytes)}, codec {index.level}", _changes(delta)]
    for tensor in largest[:_MOST_TENSORS]:
        size = sum(chunk.encoded_bytes for chunk in tensor.chunks)
        if size:
            changed = sum(chunk.changed for chunk in tensor.chunks)
            lines.append(f"  {bytes_of(size):>10}  {changed:>12,} changed  {tensor.name}")
    return plain, lines


def applied_report(applied: Applied, out: Path) -> Report:
    """Return the report of `rose weights apply`: a dictionary for --json, and lines for people."""
    plain: dict[str, object] = {
        "out": str(out),
        "bytes": applied.nbytes,
        "changed": list(applied.changed),
    }
    changes = ", ".join(f"{changed:,}" for changed in applied.changed)
    return plain, [f"{out}: {bytes_of(applied.nbytes)}; weights changed by each delta: {changes}"]


def _summary(delta: Delta) -> dict[str, object]:
    index = delta.index
    chunks = [chunk for tensor in index.tensors for chunk in tensor.chunks]
    return {
        "delta": str(delta.path),
        "bytes": delta.nbytes,
        "codec": index.level,
        "tensors": len(index.tensors),
        "changed_tensors": sum(bool(tensor.chunks) for tensor in index.tensors),
        "fresh_tensors": len(index.fresh),
        "changed": index.changed,
        "bytes_per_change": delta.nbytes / index.changed if index.changed else None,
        "chunks": dict(Counter(chunk.codec for chunk in chunks)),
    }


def _changes(delta: Delta) -> str:
    index = delta.index
    if not index.changed:
        return "no weight differs"
    touched = sum(bool(tensor.chunks) for tensor in index.tensors)
    each = delta.nbytes / index.changed
    fresh = f", {len(index.fresh)} of them new or of another shape" if index.fresh else ""
    return (
        f"{index.changed:,} weights differ in {touched} of {len(index.tensors)} tensors{fresh}:"
        f" {each:.2f} bytes each"
    )


def parser(prog: str) -> Parser:
    """Return the command-line parser of `rose weights` and its commands."""
    made = Parser(prog, description=__doc__)
    commands = made.add_commands()

    def add(name: str, work: Work, what: str, *places: str) -> Parser:
        command = commands.add_parser(name, help=what, description=what)
        for place in places:
            more: dict[str, Any] = {"nargs": "+"} if place == "deltas" else {}
            shown = place.removesuffix("s").upper()
            command.add_argument(place, type=Path, metavar=shown, **more)
        command.set_defaults(run=_run, work=work)
        return command

    def add_out(command: Parser) -> None:
        command.add_argument("-o", "--out", type=Path, required=True, metavar="PATH")

    write = add("diff", _diff, "write what makes NEW of OLD", "old", "new")
    add_out(write)
    what = "fast; compact: a third fewer bytes, slower; auto: done first on the link"
    codecs = [*(level.value for level in Level), AUTO]
    write.add_argument("--codec", choices=codecs, default=Level.FAST.value, help=what)
    what = "the link for --codec auto, in Mbit/s"
    write.add_argument("--link-mbit", type=_positive, default=1000.0, help=what)
    apply = add("apply", _apply, "write what BASE becomes", "base", "deltas")
    add_out(apply)
    for command in (write, apply):
        command.add_argument("--threads", type=_count, default=DiffSettings().threads)
    inspect = add("inspect", _inspect, "say what a delta holds", "delta")
    verify = add("verify", _verify, "compare a model with what was published", "model")
    what = "a version's manifest, or a delta to it"
    verify.add_argument("manifest", type=Path, metavar="MANIFEST", help=what)
    for command in (write, apply, inspect, verify):
        command.add_argument("--json", action="store_true", help="machine-readable")
    return made


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no speed of a link")
    return value


def _count(text: str) -> int:
    count = int(text) if text.isdigit() else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of threads")
    return count


def _run(args: argparse.Namespace) -> int:
    try:
        code, (plain, lines) = args.work(args)
    except WeightError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        options = vars(args)
        where = error.filename or options.get("out") or options.get("delta") or args.command
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "no space is left there; nothing was written" if full else error.strerror
        raise ConfigError(f"{where}: {what}") from error
    say(*([json.dumps(plain)] if args.json else lines))
    return int(code)


def _diff(args: argparse.Namespace) -> tuple[int, Report]:
    old, new = Checkpoint.open(args.old), Checkpoint.open(args.new)
    level = None if args.codec == AUTO else Level(args.codec)
    settings = DiffSettings(level, args.link_mbit * 1e6 / 8, threads=args.threads)
    with _progress(args, "compare", new.nbytes) as progress:
        delta = diff(old, new, args.out, settings, progress)
    return 0, delta_report(delta, new.nbytes)


def _apply(args: argparse.Namespace) -> tuple[int, Report]:
    base = Checkpoint.open(args.base)
    deltas = [Delta.open(path) for path in args.deltas]
    with _progress(args, "apply", base.nbytes) as progress:
        applied = apply_deltas(base, deltas, args.out, args.threads, progress)
    return 0, applied_report(applied, args.out)


def _inspect(args: argparse.Namespace) -> tuple[int, Report]:
    return 0, inspect_report(Delta.open(args.delta))


def _verify(args: argparse.Namespace) -> tuple[int, Report]:
    tensors = _wanted(args.manifest)
    found = list(mismatches(Checkpoint.open(args.model), tensors))
    plain: dict[str, object] = {
        "model": str(args.model),
        "tensors": len(tensors),
        "equal": not found,
        "differences": found,
    }
    if not found:
        return 0, (plain, [f"{args.model}: all {len(tensors)} tensors are as published"])
    lines = [f"{args.model}: {len(found)} tensors differ", *found[:_MOST_LINES]]
    return EXIT_DIFFERS, (plain, lines)


def _wanted(path: Path) -> Sequence[TensorUpdate]:
    """Return the tensors that a manifest file, or the manifest inside a delta file, lists.

    Raises ConfigError for a missing file.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give a manifest or a delta")
    with path.open("rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            return Delta.open(path).index.tensors
    return Manifest.from_bytes(path.read_bytes()).tensors


@contextmanager
def _progress(args: argparse.Namespace, what: str, total: int) -> Iterator[Progress]:
    if args.json or not sys.stderr.isatty():
        yield nothing_told
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (what, BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
