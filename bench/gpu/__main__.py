"""`python -m bench.gpu`: measurements of one NVIDIA GPU, in pieces of under ten minutes.

Exit code 0 when done, 1 when a piece or a limit failed, 2 when this machine or card cannot be
measured: then nothing was touched. Settings of the card are read, never written.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

try:
    from bench.gpu.machine import (
        REHEARSAL_LOGS,
        REHEARSAL_OUT,
        REHEARSAL_PLACE,
        ROOT,
        StandInCard,
        chosen,
        insist_alone,
        remarks,
        revision_of,
    )
    from bench.gpu.measure import Measure, measure_apart
    from bench.gpu.pieces import REHEARSAL, GpuPiece, ServingSizes, Sizes, pieces_of
    from bench.gpu.runner import NO_CLAIM, Runner, RunRequest, folder_of, summary
    from rose.errors import ConfigError, RoseError
    from rose.nvml import CardReader, Nvml, insist_usable
except ModuleNotFoundError as error:
    # The Python that sees the card is rarely the one that has ROSE.
    sys.stderr.write(f"gpu: {error.name} is not installed for {sys.executable}; see docs/gpu.md\n")
    sys.exit(2)

DEFAULT_OUT, DEFAULT_LOGS = Path("bench/results"), Path("out/gpu")


def main(
    argv: Sequence[str] | None = None,
    open_reader: Callable[[], CardReader] = Nvml,
    measure: Measure = measure_apart,
) -> int:
    """Run the pieces; tests give a stand-in for the driver, or for the pieces' processes."""
    args = _parser().parse_args(argv)
    try:
        if args.list:
            return _list(args)
        if args.draw:
            if not _draw(args.draw):
                raise ConfigError(
                    f"nothing to draw in {args.draw}; name a folder that has results of pieces"
                )
            return 0
        if args.rehearse:
            return _rehearse(args)
        return _run(args, open_reader(), measure)
    except RoseError as error:
        sys.stderr.write(f"gpu: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("gpu: interrupted; run it again for what is left\n")
        return 130


def _list(args: argparse.Namespace) -> int:
    sizes = _sizes(args)
    for piece in _pieces(args):
        _say(
            f"{piece.name:<8} about {piece.takes_s(sizes):3.0f} s,"
            f" {piece.memory(sizes) / (1 << 30):3.0f} GiB: {piece.what}"
            + (f" ({missing})" if (missing := piece.missing()) else "")
        )
    return 0


def _rehearse(args: argparse.Namespace) -> int:
    """Run the served pieces on CPUs: results go elsewhere, and each says that it is a rehearsal."""
    args.out = REHEARSAL_OUT if args.out == DEFAULT_OUT else args.out
    args.logs = REHEARSAL_LOGS if args.logs == DEFAULT_LOGS else args.logs
    if args.out.resolve().is_relative_to(DEFAULT_OUT.resolve()):
        raise ConfigError(f"a rehearsal is no result; name a folder outside {DEFAULT_OUT}")
    _say(f"note: {NO_CLAIM}")
    return _run(args, StandInCard(), partial(measure_apart, place=REHEARSAL_PLACE))


def _run(args: argparse.Namespace, reader: CardReader, measure: Measure) -> int:
    request = RunRequest(
        pieces=_pieces(args),
        sizes=_sizes(args),
        out=args.out,
        logs=args.logs,
        revision=revision_of(ROOT, args.commit),
        resume=args.resume,
        budget_s=args.budget_s,
        named=bool(args.only),
        rehearsal=args.rehearse,
    )
    card = chosen(reader.cards(), args.gpu)
    insist_usable(card)
    usage = reader.usage(card)
    insist_alone(card, usage)
    runner = Runner(reader, card, request, measure)
    runner.insist_room(usage)
    _say(f"{card.name}, driver {card.driver}, commit {request.revision}")
    for remark in remarks(card, usage):
        _say(f"note: {remark}")
    outcomes = runner.run(_say)
    _draw(folder_of(args.out, card.name))
    _say(summary(outcomes))
    return int(not all(outcome.good for outcome in outcomes))


def _draw(folder: Path) -> Path | None:
    try:
        from bench.gpu.plot import draw
    except ImportError as error:
        _say(f"note: no picture, {error.name} is not installed; --draw makes it elsewhere")
        return None
    if path := draw(folder):
        _say(f"picture: {path}")
    return path


def _pieces(args: argparse.Namespace) -> tuple[GpuPiece, ...]:
    """Return the pieces asked for; of a rehearsal those that start engines."""
    pieces = pieces_of(tuple(args.only))
    return tuple(piece for piece in pieces if piece.served) if args.rehearse else pieces


def _sizes(args: argparse.Namespace) -> Sizes:
    given = {
        "arm_s": args.arm_s,
        "rounds": args.arm_rounds,
        "azure": args.azure and str(args.azure.absolute()),
        "kv_backend": args.kv_backend,
        "seed": args.seed,
    }
    given = {name: value for name, value in given.items() if value is not None}
    serving = replace(REHEARSAL if args.rehearse else ServingSizes(), **given)
    return Sizes(gib=args.gib, density=args.density, rounds=args.rounds, serving=serving)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    sizes = Sizes()
    parser = argparse.ArgumentParser(prog="bench.gpu", description=__doc__)
    add = parser.add_argument
    add("--list", action="store_true", help="show the pieces, measure nothing")
    add("--draw", type=Path, metavar="DIR", help="the picture of results, no more")
    add("--only", nargs="+", default=[], metavar="PIECE", help="these alone")
    add(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="skip what this commit measured before (default)",
    )
    add("--budget-s", type=float, metavar="S", help="begin nothing that ends later")
    add("--gpu", type=int, metavar="INDEX", help="needed where there are several")
    add("--out", type=Path, default=DEFAULT_OUT, metavar="DIR")
    add("--logs", type=Path, default=DEFAULT_LOGS, metavar="DIR")
    add("--commit", default="", metavar="HASH", help="for a copy without git")
    add("--gib", type=float, default=sizes.gib, help="size of each timed tensor")
    add("--density", type=float, default=sizes.density, help="share of changes")
    add("--rounds", type=int, default=sizes.rounds)
    add("--rehearse", action="store_true", help="pieces with engines, tiny, on CPUs: no figures")
    add("--arm-s", type=float, metavar="S", help="load of an arm in one round")
    add("--arm-rounds", type=int, metavar="N", help="at most, where time is left")
    add("--azure", type=Path, metavar="CSV", help="bursts of this trace")
    add("--kv-backend", metavar="NAME", help="the guest's: auto, cuda or madvise")
    add("--seed", type=int, metavar="N", help="of arrivals and of orders")
    return parser


if __name__ == "__main__":
    # The piece's process is ended on the way out, as after an error.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main())
