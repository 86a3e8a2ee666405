"""`rose advise`: what lending would bring, from what the cluster has already; nothing is installed.

    rose advise --prometheus http://prometheus:9090                  the last 7 days
    rose advise --metrics http://host:8000/metrics --for-s 600       from now on, without Prometheus
    rose advise --trace requests.csv --gpus 8 --model 8b             requests alone

It only reads. Exit code 2, with one line, for bad input; 4 if nothing answers.
"""

import argparse
import time
from datetime import UTC, datetime
from pathlib import Path

from rose.advise.advice import Assumed, advice_of
from rose.advise.page import page_of, view
from rose.advise.usage import BY, PrometheusHistory, trace_usage, watched_usages
from rose.cli.options import metrics_text
from rose.command_line.output import Format, add_output_options, note, write
from rose.command_line.parser import Parser
from rose.errors import ConfigError

DAYS, FOR_S, EVERY_S = 7.0, 600.0, 5.0


def parser(prog: str) -> Parser:
    """Return the command-line parser of `rose advise`."""
    made = Parser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.set_defaults(run=_run)
    add = made.add_argument
    source = made.add_mutually_exclusive_group(required=True)
    source.add_argument("--prometheus", metavar="URL", help="that scrapes your engines")
    source.add_argument("--metrics", nargs="+", metavar="URL", help="of engines, read for --for-s")
    source.add_argument(
        "--trace", type=Path, metavar="FILE", help="requests, CSV in Azure's format"
    )
    add("--days", type=float, default=DAYS, metavar="N", help=f"of history, default {DAYS:g}")
    add("--by", default=BY, metavar="LABELS", help=f"one deployment each, default {BY}")
    add("--token-file", type=Path, metavar="FILE", help="bearer token for Prometheus")
    add("--for-s", type=float, default=FOR_S, metavar="S", help=f"of --metrics, default {FOR_S:g}")
    add("--gpus", type=int, metavar="N", help="that serve the --trace")
    what = "published table of a model: 8b, 32b or 70b; default: the nearest to its name"
    add("--model", action="append", default=[], metavar="[NAME=]TABLE", help=what)
    add("--cards", type=int, default=1, metavar="N", help="GPUs of one engine, default 1")
    add("--card", default="h200", help="h200 or h100; default h200")
    add("--guest", default="8b", metavar="MODEL", help="of the rollouts; default 8b")
    add("--ttft-s", type=float, default=2.0, metavar="S", help="promised to users; default 2")
    add("--tpot-s", type=float, default=0.2, metavar="S", help="promised to users; default 0.2")
    add("--price", type=float, metavar="MONEY", help="of a GPU-hour, in any currency")
    add("--out", type=Path, metavar="FILE", help="write a page in HTML, with plots")
    add_output_options(made)
    return made


def _run(args: argparse.Namespace) -> int:
    assumed = Assumed(
        args.cards,
        args.card,
        args.guest,
        args.price,
        args.ttft_s,
        args.tpot_s,
        tuple(_named_table(each) for each in args.model),
    )
    if args.out is not None and args.out.exists():
        raise ConfigError(f"{args.out} is there already; give another --out")
    if args.prometheus is not None:
        if args.days <= 0:
            raise ConfigError(f"--days is {args.days:g}; give a number above 0")
        token = _token(args.token_file) if args.token_file else None
        by = [label for label in args.by.split(",") if label]
        usages = PrometheusHistory(args.prometheus, by, token).usages(args.days, time.time())
    elif args.metrics is not None:
        if args.for_s < EVERY_S:
            raise ConfigError(f"--for-s is {args.for_s:g}; give {EVERY_S:g} seconds or more")
        note(f"reading {len(args.metrics)} engines for {args.for_s:g} s")
        usages = watched_usages(args.metrics, args.for_s, EVERY_S, metrics_text)
    else:
        if args.gpus is None:
            raise ConfigError("--gpus is missing: how many GPUs serve the trace")
        usages = [trace_usage(args.trace, args.gpus / args.cards)]
    advice = advice_of(usages, assumed)
    if args.out is not None:
        made_at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        args.out.write_text(page_of(advice, made_at), encoding="utf-8")
        note(f"{args.out} is written")
    write(view(advice), Format(args.output))
    return 0


def _named_table(text: str) -> tuple[str, str]:
    name, equals, table = text.rpartition("=")
    return (name, table) if equals else ("", text)


def _token(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {file}: {error}") from error
