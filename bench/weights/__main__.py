"""`python -m bench.weights`: sizes and speeds of weight updates, beside another scheme.

Writes weights.json and weights.txt, with `--only ranks` weights-ranks.json and .txt.
Exit code 0, 1 when a limit fails, 2 for bad input.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.common.checks import FAILS, row_verdict
from bench.common.report import add_out_folder, machine, parser_of, put_both, reported, say
from bench.weights.codec import peaks, sizes, speeds
from bench.weights.link import link_figures
from bench.weights.ranks import rank_memory
from bench.weights.report import checks, rank_checks, rank_table, table
from bench.weights.steps import adam_step, rate_for, training_steps

PROG = "bench.weights"
progress = partial(say, "weights")
DENSITIES = (0.001, 0.01, 0.019, 0.02, 0.046, 0.05, 0.119, 0.2, 0.5)
SPEED_DENSITIES = (0.01, 0.02, 0.1)
MEMORY_DENSITIES = (0.02, 0.2, 0.5)
RATES = (1e-6, 3e-6, 1e-5, 2e-4)
TRAINED_STEPS = 3
SIZE_ROWS, SIZE_COLUMNS = 4096, 4096


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, PROG)
    add_out_folder(parser)
    parser.add_argument("--models", type=Path, default=Path("out/models"), metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["ranks"], help="one part alone")
    args = parser.parse_args(argv)
    return reported(PROG, lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    if args.only:
        name, result = f"weights-{args.only}", ranks_of(args.seed)
        judged, lay_out = rank_checks(result["ranks"]), rank_table
    else:
        name, result = "weights", measure(args.models, args.seed)
        judged, lay_out = checks(result), table
    result["checks"] = judged
    put_both(args.out, name, result, lay_out(result))
    return int(row_verdict(judged) == FAILS)


def measure(models: Path, seed: int) -> dict[str, Any]:
    from bench.demo.frozen_lake.models import ensure_models

    synthetic = []
    for density in DENSITIES:
        progress(f"synthetic step, {density:.1%} of the weights change")
        step = adam_step(SIZE_ROWS, SIZE_COLUMNS, rate_for(density), seed)
        synthetic.append({"wanted": density, **sizes([step])})
    fast = []
    for density in SPEED_DENSITIES:
        progress(f"speed at {density:.0%}")
        fast.append(speeds(rate_for(density), seed))
    progress("memory")
    memory = [row for density in MEMORY_DENSITIES for row in peaks(rate_for(density), seed)]
    policy = ensure_models(models, False, lambda label, share: None).policy_dir
    trained = []
    for rate in RATES:
        progress(f"training at a rate of {rate:g}")
        for number, steps in enumerate(training_steps(policy, rate, TRAINED_STEPS, seed)):
            trained.append({"rate": rate, "step": number, **sizes(steps)})
    result: dict[str, Any] = {
        "machine": {**machine(), "seed": seed},
        "synthetic": synthetic,
        "speed": fast,
        "memory": memory,
        "trained": trained,
    }
    progress("a base across a shaped link")
    result["link"] = link_figures(seed)
    return result | ranks_of(seed)


def ranks_of(seed: int) -> dict[str, Any]:
    """Measure the memory of ranks that share a checkpoint, and nothing else."""
    progress("ranks that share a checkpoint")
    return {"ranks": rank_memory(seed)}


if __name__ == "__main__":
    sys.exit(main())
