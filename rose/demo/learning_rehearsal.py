"""`python -m rose.demo.learning_rehearsal --out DIR`: does the recipe learn? Without engines.

The trainer is the demo's own, staleness included; only turns come from `LocalPolicy`.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from rose.demo.local_policy import LocalPolicy
from rose.demo.model import load_policy
from rose.demo.models import ensure_models
from rose.demo.settings import DEFAULT_STEPS
from rose.demo.train_config import Control, TrainConfig
from rose.demo.trainer import Trainer


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="rose.demo.learning_rehearsal", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("out/models"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS)
    parser.add_argument("--control", choices=get_args(Control), default="none")
    parser.add_argument("--long-turns", action="store_true")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    models = ensure_models(args.cache, args.long_turns, lambda _label, _share: None)
    config = TrainConfig(
        model_dir=models.policy_dir,
        gateway_url="",
        scheduler="",
        out=args.out,
        publish_root=args.out,
        publish_port=0,
        key=args.out,
        seed=args.seed,
        steps=args.steps,
        decay_steps=args.steps,
        control=args.control,
        long_turns=args.long_turns,
    )
    asyncio.run(_rehearse(config))
    return 0


async def _rehearse(config: TrainConfig) -> None:
    events: list[dict[str, Any]] = []
    policy = LocalPolicy(load_policy(config.model_dir), config.seed)
    started_s = time.monotonic()
    await Trainer(config, policy, policy, events.append).run()
    sys.stdout.write(json.dumps(_summary(events, time.monotonic() - started_s)) + "\n")


def _summary(events: Sequence[dict[str, Any]], elapsed_s: float) -> dict[str, object]:
    steps = [event for event in events if event["event"] == "step"]
    evals = {event["which"]: event["success"] for event in events if event["event"] == "eval"}
    fifth = max(1, len(steps) // 5)
    return {
        "steps": len(steps),
        "elapsed_s": round(elapsed_s, 1),
        "reward_first_fifth": round(_mean(steps[:fifth], "reward_mean"), 3),
        "reward_last_fifth": round(_mean(steps[-fifth:], "reward_mean"), 3),
        "held_out_warm_start": round(evals["warm_start"], 3),
        "held_out_final": round(evals["final"], 3),
        "train_s": round(_mean(steps, "train_s"), 3),
        "tokens": round(_mean(steps, "tokens")),
        "spanning_share": round(_mean(steps, "spanning") / _mean(steps, "trajectories"), 3),
        "clip_fraction": round(_mean(steps, "clip_fraction"), 5),
        "density": round(_mean(steps, "density"), 3),
    }


def _mean(steps: Sequence[dict[str, Any]], name: str) -> float:
    return sum(float(step[name]) for step in steps) / len(steps)


if __name__ == "__main__":
    sys.exit(main())
