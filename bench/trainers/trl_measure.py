"""`python -m bench.trainers.trl_measure`: TRL through ROSE beside TRL on a stock vLLM.

    seed 0:  server mode on ROSE without weight syncs, the same on a stock vLLM,
             server mode with them, AsyncGRPOTrainer
    seed 1:  …

Both engines are started once, with the same settings, and idle while the other one is asked. Steps
are compared without weight sync, since TRL's own needs CUDA: both arms train on rollouts of weights
that stay as they were, so their completions are as long. The trainings that learn run beside that.
Their syncs stand apart, beside a reload of the whole checkpoint by the stock engine; and so do
their steps less their syncs: a policy that learns answers at other lengths, and the replica is
still busy with the new weights when they begin. Writes trl.json and trl.txt; `curves` draws the
rewards. Exit code 0, 1 when a limit is missed, 2 for bad input or a bench that does not work.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import aiohttp

from bench.common.checks import text_table
from bench.common.report import machine, put_both, reported, say
from bench.trainers.engines import (
    PairedEngines,
    measuring_parser,
    ratio_of_medians,
    ratio_text,
    thirds,
    windows_of,
)
from bench.trainers.stack import save_trl_policy, train_trl, trainer_python
from rose.client.blocking import LoopThread
from rose.errors import EngineStartError

PROG = "bench.trainers.trl_measure"
MOST_RATIO, MOST_DRIFT = 1.1, 0.01
# The first steps of a run warm caches up; a window of steps is one unit of chance.
WARM, WINDOW = 2, 5
RELOADS = 5
ASYNC_STEPS = 30
ARMS = ("unsynced", "stock", "server", "async")
LEARNING = ("server", "async")


@dataclass(frozen=True, slots=True)
class TrlRun:
    """One training. step_s: of each step, without its weight sync; turns_s: of that, until its
    turns are there; drift: mean difference of the trainer's logprobs and the sampler's."""

    arm: str
    seed: int
    rewards: list[float]
    step_s: list[float]
    sync_s: list[float]
    drift: float | None
    turns_s: list[float]

    @classmethod
    def of(cls, steps: Sequence[Mapping[str, Any]], arm: str, seed: int) -> "TrlRun":
        """Return the training with these steps."""
        drifts = [row.get("sampling/sampling_logp_difference/mean") for row in steps]
        known = [drift for drift in drifts if drift is not None]
        return cls(
            arm,
            seed,
            [row["reward"] for row in steps],
            [row.get("step_time", 0.0) - row["sync_s"] for row in steps],
            [row.get("perf/weight_sync_s") or row["sync_s"] for row in steps],
            mean(known) if known else None,
            [row["turns_s"] for row in steps],
        )

    @property
    def learned(self) -> bool:
        """True if the reward of its last third is above that of its first."""
        first, last = thirds(self.rewards)
        return last > first


def summary(runs: Sequence[TrlRun], reloads: Sequence[float]) -> dict[str, Any]:
    """Return all figures that have a limit, and those beside them."""
    by_arm = {arm: [run for run in runs if run.arm == arm] for arm in ARMS}
    ratio = ratio_of_medians(
        [
            window
            for rose, stock in zip(by_arm["unsynced"], by_arm["stock"], strict=True)
            for window in windows_of(rose.step_s[WARM:], stock.step_s[WARM:], WINDOW)
        ]
    )
    timed = ("unsynced", "stock", "server")
    learning = [run for arm in LEARNING for run in by_arm[arm]]
    drift = max(run.drift or 0.0 for run in by_arm["server"])
    holds = ratio.value <= MOST_RATIO and drift <= MOST_DRIFT
    return {
        "step_ratio": ratio,
        "step_s": {a: median(s for run in by_arm[a] for s in run.step_s[WARM:]) for a in timed},
        "turns_s": {a: median(s for run in by_arm[a] for s in run.turns_s[WARM:]) for a in timed},
        "sync_s": median(s for run in by_arm["server"] for s in run.sync_s[WARM:]),
        "reload_s": median(reloads),
        "drift": drift,
        "learned": {
            arm: f"{sum(run.learned for run in by_arm[arm])} of {len(by_arm[arm])}"
            for arm in LEARNING
        },
        "holds": holds and all(run.learned for run in learning),
    }


def table(found: dict[str, Any]) -> str:
    step_s, turns_s, learned = found["step_s"], found["turns_s"], found["learned"]
    rows = [
        ("step without sync, ROSE", f"{step_s['unsynced']:.3f} s", ""),
        ("step without sync, stock vLLM", f"{step_s['stock']:.3f} s", ""),
        ("of it, turns, ROSE", f"{turns_s['unsynced']:.3f} s", ""),
        ("of it, turns, stock vLLM", f"{turns_s['stock']:.3f} s", ""),
        ("ratio of medians", ratio_text(found["step_ratio"]), f"<= {MOST_RATIO}"),
        ("step that learns, less its sync, ROSE", f"{step_s['server']:.3f} s", ""),
        ("weight sync, served", f"{found['sync_s']:.3f} s", ""),
        ("reload of the checkpoint, stock vLLM", f"{found['reload_s']:.3f} s", ""),
        ("logprobs, trainer and sampler", f"{found['drift']:.4f}", f"<= {MOST_DRIFT}"),
        ("seeds that learned, server mode", learned["server"], "all"),
        ("seeds that learned, async", learned["async"], "all"),
    ]
    return text_table("TRL", ("figure", "value", "limit"), rows)


def train(arm: str, seed: int, folder: Path, engines: PairedEngines, **options: object) -> TrlRun:
    """Train once. EngineStartError where the trainer fails."""
    stack = engines.stack
    options |= {"model": stack.model, "seed": seed}
    if arm == "stock":
        options["url"] = engines.spec.url
    environ = stack.environ(root=folder.with_name(f"{folder.name}-published"))
    return TrlRun.of(train_trl(trainer_python("trl"), folder, environ, arm, **options), arm, seed)


async def reload_s(url: str) -> float:
    """Return the seconds in which the stock engine reads its checkpoint anew."""
    began_s = time.perf_counter()
    async with (
        aiohttp.ClientSession(url) as http,
        http.post("/collective_rpc", json={"method": "reload_weights"}) as answer,
    ):
        if answer.status != 200:
            raise EngineStartError(f"the stock engine reloads nothing: {await answer.text()}")
    return time.perf_counter() - began_s


def main(argv: Sequence[str] | None = None) -> int:
    args = measuring_parser(__doc__, PROG, seeds=3, steps=40, tokens=16).parse_args(argv)
    return reported("trl", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    loop, runs = LoopThread("rose-bench"), list[TrlRun]()
    folder = Path(tempfile.mkdtemp(prefix="rose-trl-"))
    model = save_trl_policy(folder / "model", trainer_python("trl"))
    try:
        with PairedEngines(folder, model, loop, unpacked=args.unpacked) as engines:
            for seed in range(args.seeds):
                for arm in ARMS:
                    steps = ASYNC_STEPS if arm == "async" else args.steps
                    place, options = folder / f"{arm}-{seed}", {"tokens": args.tokens}
                    runs.append(train(arm, seed, place, engines, steps=steps, **options))
                    say("trl", f"seed {seed}, {arm}: reward {runs[-1].rewards[-1]:.2f}")
            reloads = [loop.call(reload_s(engines.spec.url)) for _ in range(RELOADS)]
    finally:
        loop.stop()
    found = summary(runs, reloads)
    result = {"summary": found, "unpacked": args.unpacked, "machine": machine(), "runs": runs}
    put_both(args.out, "trl", result, table(found))
    return int(not found["holds"])


if __name__ == "__main__":
    sys.exit(main())
