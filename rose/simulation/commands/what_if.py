"""`rose sim what-if`: what lending would gain, and what it would cost users, by their own trace.

The trace is played by the fluid model with step times of published GPU tables; every assumption is
listed under the answer. Nothing is measured: `rose compare` on a real host has the last word.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from elastic_scheduler.capacity.policy import MaxHostBusy
from rose.command_line.output import Format, Table, View, add_output_options, write
from rose.errors import ConfigError
from rose.simulation.fluid.what_if import WhatIfAnswer, WhatIfQuestion, what_if
from rose.simulation.plots import save_what_if
from rose.simulation.results import Latencies
from rose.simulation.workload import Request
from rose.simulation.workloads.serving import MAX_GAP_S, TraceTraffic
from slo import SloSpec, TargetError

TTFT_S, TPOT_S = 2.0, 0.2
LEAST_HOST_BUSY = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "--trace",
        type=Path,
        required=True,
        metavar="FILE",
        help="users' requests, CSV in the Azure LLM format",
    )
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="that serve them")
    parser.add_argument("--model", required=True, help="that they serve: 8b, 32b or 70b")
    parser.add_argument(
        "--guest", default="8b", metavar="MODEL", help="of the rollouts; default 8b"
    )
    parser.add_argument("--card", default="h200", help="h200 or h100; default h200")
    parser.add_argument("--engine", default="vllm", help="vllm or sglang; default vllm")
    parser.add_argument("--cards", type=int, metavar="N", help="of one engine; default: the fewest")
    parser.add_argument(
        "--ttft-s",
        type=float,
        default=TTFT_S,
        metavar="S",
        help=f"promised to users; default {TTFT_S:g}",
    )
    parser.add_argument(
        "--tpot-s",
        type=float,
        default=TPOT_S,
        metavar="S",
        help=f"promised to users; default {TPOT_S:g}",
    )
    parser.add_argument(
        "--slack-share",
        type=_share,
        default=0.0,
        metavar="SHARE",
        help="of a busy host's slack that is lent; default 0: idle time alone",
    )
    parser.add_argument(
        "--max-host-busy",
        type=_share,
        default=MaxHostBusy().share,
        metavar="SHARE",
        help=f"beside busier hosts nothing is lent, 1: no limit; default {MaxHostBusy().share:g}",
    )
    parser.add_argument(
        "--context", type=int, default=4_096, metavar="TOKENS", help="of a rollout; default 4096"
    )
    parser.add_argument(
        "--max-gap-s",
        type=float,
        default=MAX_GAP_S,
        metavar="S",
        help="a trace with longer gaps is refused; default 3600",
    )
    parser.add_argument("--plots", type=Path, metavar="DIR", help="folder for what-if.png")
    add_output_options(parser)


def run(args: argparse.Namespace) -> int:
    """Answer, draw, print. Raises RoseError with one line."""
    trace = TraceTraffic(args.trace, max_gap_s=args.max_gap_s)

    def requests() -> Iterator[Request]:
        return trace.requests(0)

    answer = what_if(_question(args), requests)
    if args.plots is not None:
        save_what_if(answer, args.plots)
    write(view(answer), Format(args.output))
    return 0


def view(answer: WhatIfAnswer) -> View:
    """The answer: gains, costs, and what was assumed."""
    gains = (
        ("users keep the hosts busy", f"{answer.busy:.1%} of the time"),
        ("rollouts could have", f"{answer.lent:.1%} of the cards"),
        ("hosts are held for being too busy", f"{answer.held:.1%} of the time"),
        ("tokens that could be harvested", f"{answer.harvested_tokens_a_day:.3g} a day"),
        ("GPU-hours saved", f"{answer.gpu_hours_saved_a_day:.0f} a day"),
    )
    alone, lending = _column(answer.alone), _column(answer.lending)
    names = ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "within targets")
    return View(
        answer.plain(),
        (f"{answer.requests} requests in {answer.hours:.2f} h on {answer.hosts} hosts",),
        (
            Table(("FIGURE", "VALUE"), gains, right=frozenset(("VALUE",))),
            Table(
                ("USERS", "ALONE", "LENDING"),
                tuple(zip(names, alone, lending, strict=True)),
                right=frozenset(("ALONE", "LENDING")),
            ),
            Table(("ASSUMED",), tuple((each,) for each in answer.assumptions)),
        ),
    )


def _column(users: Latencies) -> tuple[str, ...]:
    return (
        f"{users.ttft_s.p50:.3f} s",
        f"{users.ttft_s.p99:.3f} s",
        f"{1e3 * users.tpot_s.p50:.1f} ms",
        f"{1e3 * users.tpot_s.p99:.1f} ms",
        f"{users.attainment:.3%}",
    )


def _question(args: argparse.Namespace) -> WhatIfQuestion:
    try:
        slo = SloSpec(args.model, args.ttft_s, args.tpot_s)
    except TargetError as error:
        raise ConfigError(f"--ttft-s, --tpot-s: {error}") from error
    hold = None
    if args.max_host_busy < 1:
        usual = MaxHostBusy()
        resume = args.max_host_busy * usual.resume / usual.share
        if args.max_host_busy < LEAST_HOST_BUSY:
            raise ConfigError(
                f"--max-host-busy is {args.max_host_busy:g}; give {LEAST_HOST_BUSY:g} to 1"
            )
        hold = MaxHostBusy(share=args.max_host_busy, resume=round(resume, 3))
    return WhatIfQuestion(
        gpus=args.gpus,
        model=args.model,
        slo=slo,
        guest=args.guest,
        card=args.card,
        engine=args.engine,
        cards=args.cards,
        slack_share=args.slack_share,
        hold=hold,
        context=args.context,
    )


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share from 0 to 1")
    return value
