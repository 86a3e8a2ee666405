"""`python -m bench.weights`: sizes and speeds of weight updates, beside others' schemes.

Writes weights.json and weights.txt, with `--only ranks` weights-ranks.json and .txt.
Exit code 0, 1 when a limit fails, 2 for bad input.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.weights.codec import peaks, sizes, speeds
from bench.weights.link import link_figures
from bench.weights.ranks import rank_memory
from bench.weights.report import checks, on_paper, rank_checks, rank_table, table
from bench.weights.steps import adam_step, rate_for
from rose.errors import RoseError

DENSITIES = (0.001, 0.01, 0.019, 0.02, 0.046, 0.05, 0.119, 0.2, 0.5)
SPEED_DENSITIES = (0.01, 0.02, 0.1)
MEMORY_DENSITIES = (0.02, 0.2, 0.5)
RATES = (1e-6, 3e-6, 1e-5, 2e-4)
TRAINED_STEPS = 3
SIZE_ROWS, SIZE_COLUMNS = 4096, 4096


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    name = "weights" if args.only is None else f"weights-{args.only}"
    try:
        result = ranks_alone(args.seed) if args.only else measure(args.models, args.seed)
    except RoseError as error:
        sys.stderr.write(f"bench: {error}\n")
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    text = rank_table(result) if args.only else table(result)
    (args.out / f"{name}.txt").write_text(text)
    sys.stdout.write(text)
    return int(any(check["verdict"] == "FAILS" for check in result["checks"]))  # type: ignore[attr-defined]


def measure(models: Path, seed: int) -> dict[str, object]:
    """Everything."""
    from bench.demo.frozen_lake.models import ensure_models
    from bench.weights.steps import training_steps

    synthetic = []
    for density in DENSITIES:
        _say(f"synthetic step, {density:.1%} of the weights change")
        step = adam_step(SIZE_ROWS, SIZE_COLUMNS, rate_for(density), seed)
        synthetic.append({"wanted": density, **sizes([step])})
    fast = []
    for density in SPEED_DENSITIES:
        _say(f"speed at {density:.0%}")
        fast.append(speeds(rate_for(density), seed))
    _say("memory")
    memory = [row for density in MEMORY_DENSITIES for row in peaks(rate_for(density), seed)]
    policy = ensure_models(models, False, lambda label, share: None).policy_dir
    trained = []
    for rate in RATES:
        _say(f"training at a rate of {rate:g}")
        for number, steps in enumerate(training_steps(policy, rate, TRAINED_STEPS, seed)):
            trained.append({"rate": rate, "step": number, **sizes(steps)})
    each = synthetic[1]["bytes_per_change"]
    encode = {level: fast[0][f"encode_{level}"]["all"] for level in ("fast", "compact")}  # type: ignore[index]
    result: dict[str, object] = {
        "machine": {"cpus": os.cpu_count(), "cpu": platform.processor(), "seed": seed},
        "synthetic": synthetic,
        "speed": fast,
        "memory": memory,
        "trained": trained,
        "on_paper": on_paper(0.01, each, encode),  # type: ignore[arg-type]
    }
    _say("a base across a shaped link")
    result["link"] = link_figures(seed)
    result["ranks"] = _ranks(seed)
    result["checks"] = checks(result)
    return result


def ranks_alone(seed: int) -> dict[str, object]:
    """The memory of ranks that share a checkpoint, and nothing else."""
    rows = _ranks(seed)
    return {"ranks": rows, "checks": rank_checks(rows)}


def _ranks(seed: int) -> list[dict[str, object]]:
    _say("ranks that share a checkpoint")
    return rank_memory(seed)


def _say(what: str) -> None:
    sys.stderr.write(f"bench: {what}\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.weights", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/bench"), metavar="DIR")
    parser.add_argument("--models", type=Path, default=Path("out/models"), metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["ranks"], help="one part alone")
    return parser


if __name__ == "__main__":
    sys.exit(main())
