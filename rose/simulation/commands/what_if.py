"""`rose sim what-if`: what lending would gain, and what it would cost users, by their own trace.

The trace is a CSV in the Azure LLM format: `TIMESTAMP,ContextTokens,GeneratedTokens`, times rising.
It is played by a fluid model with step times of published GPU tables; every assumption is listed
under the answer. Nothing is measured, so `rose compare` on a real host has the last word.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from elastic_scheduler.capacity.policy import MaxHostBusy
from rose.cli.main import Parser
from rose.errors import ConfigError
from rose.simulation.fluid.what_if import WhatIfAnswer, WhatIfQuestion, what_if
from rose.simulation.workload import Request
from rose.simulation.workloads.serving import MAX_GAP_S, TraceTraffic
from slo import SloSpec, TargetError

TTFT_S, TPOT_S = 2.0, 0.2


def main(argv: Sequence[str] | None = None) -> int:
    """Answer; what cannot be read or be raises RoseError, which `rose` says in one line."""
    args = _arguments(argv)
    trace = TraceTraffic(args.trace, max_gap_s=args.max_gap_s)

    def requests() -> Iterator[Request]:
        return trace.requests(0)

    answer = what_if(_question(args), requests)
    if args.plots is not None:
        from rose.simulation.plots import save_what_if

        save_what_if(answer, args.plots)
    if args.output == "json":
        sys.stdout.write(json.dumps(answer.plain(), indent=2, allow_nan=False) + "\n")
    else:
        sys.stdout.write("\n".join(lines(answer)) + "\n")
    return 0


def lines(answer: WhatIfAnswer) -> Iterator[str]:
    """The answer for a person."""
    alone, lending = answer.alone, answer.lending
    yield f"{answer.requests} requests in {answer.hours:.2f} h on {answer.hosts} hosts"
    yield f"users keep the hosts busy for           {answer.busy:8.1%} of the time"
    yield f"rollouts could have                     {answer.lent:8.1%} of the cards"
    yield f"hosts are held for being too busy for   {answer.held:8.1%} of the time"
    yield f"tokens that could be harvested          {answer.harvested_tokens_a_day:8.3g} a day"
    yield f"GPU-hours saved                         {answer.gpu_hours_saved_a_day:8.1f} a day"
    yield ""
    yield f"{'users':>24}{'alone':>12}{'lending':>12}"
    for name, key in (("p50", "p50"), ("p99", "p99")):
        before, after = getattr(alone.ttft_s, key), getattr(lending.ttft_s, key)
        yield f"{'TTFT ' + name:>24}{before:>10.3f} s{after:>10.3f} s"
    for name, key in (("p50", "p50"), ("p99", "p99")):
        before, after = 1e3 * getattr(alone.tpot_s, key), 1e3 * getattr(lending.tpot_s, key)
        yield f"{'TPOT ' + name:>24}{before:>9.1f} ms{after:>9.1f} ms"
    yield f"{'within targets':>24}{alone.attainment:>12.3%}{lending.attainment:>12.3%}"
    yield ""
    yield "assumed:"
    for assumption in answer.assumptions:
        yield f"* {assumption}"


def _question(args: argparse.Namespace) -> WhatIfQuestion:
    try:
        slo = SloSpec(args.model, args.ttft_s, args.tpot_s)
    except TargetError as error:
        raise ConfigError(f"--ttft-s, --tpot-s: {error}") from error
    hold = None
    if args.max_host_busy < 1:
        usual = MaxHostBusy()
        resume = args.max_host_busy * usual.resume / usual.share
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


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="rose sim what-if",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="users' requests")
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
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    return parser.parse_args(argv)


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no share from 0 to 1")
    return value
