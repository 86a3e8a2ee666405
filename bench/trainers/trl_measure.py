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
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import aiohttp

from bench.common.checks import text_table
from bench.common.processes import ROOT
from bench.common.report import machine, put_both, reported, say
from bench.trainers.engines import (
    PairedEngines,
    measuring_parser,
    ratio_of_medians,
    ratio_text,
    windows_of,
)
from bench.trainers.policy import save_policy
from bench.trainers.stack import run_program
from rose.client.blocking import LoopThread
from rose.errors import ConfigError, EngineStartError

PROG, PROGRAM = "bench.trainers.trl_measure", "bench.trainers.trl_run"
MOST_RATIO, MOST_DRIFT = 1.1, 0.01
# The first steps of a run warm caches up; a window of steps is one unit of chance.
WARM, WINDOW = 2, 5
RELOADS = 5
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
    def read(cls, out: Path, arm: str, seed: int) -> "TrlRun":
        """Return the training whose steps its program wrote to a file."""
        rows: list[dict[str, Any]] = [json.loads(line) for line in out.read_text().splitlines()]
        steps = [row for row in rows if "step" in row]
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
        third = len(self.rewards) // 3
        return mean(self.rewards[-third:]) > mean(self.rewards[:third])


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


def train(arm: str, seed: int, folder: Path, engines: PairedEngines, *program: str) -> TrlRun:
    """Train once by the `program`'s command line. EngineStartError where the trainer fails."""
    folder.mkdir()
    argv = [*program, arm, f"--model={engines.stack.model}", f"--seed={seed}"]
    argv += [f"--folder={folder / 'saved'}", f"--out={folder / 'out'}"]
    argv += [f"--url={engines.spec.url}"] if arm == "stock" else []
    run_program(argv, folder, engines.stack.environ(root=folder / "published"))
    return TrlRun.read(folder / "out", arm, seed)


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
    parser = measuring_parser(__doc__, PROG)
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-trl/bin/python")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=16, help="of a completion")
    parser.add_argument("--async-steps", type=int, default=30)
    args = parser.parse_args(argv)
    return reported("trl", lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    python, loop, runs = args.python, LoopThread("rose-bench"), list[TrlRun]()
    if not python.exists():
        raise ConfigError(f"there is no {python}; make it: scripts/trainer-env trl")
    (template,) = python.parents[1].glob("lib/*/site-packages/trl/chat_templates/qwen2_5.jinja")
    folder = Path(tempfile.mkdtemp(prefix="rose-trl-"))
    model = save_policy(folder / "model", template.read_text(encoding="utf-8"))
    try:
        with PairedEngines(folder, model, loop, unpacked=args.unpacked) as engines:
            for seed in range(args.seeds):
                for arm in ARMS:
                    steps = args.async_steps if arm == "async" else args.steps
                    program = (str(python), "-m", PROGRAM, f"--steps={steps}")
                    options = (*program, f"--tokens={args.tokens}")
                    runs.append(train(arm, seed, folder / f"{arm}-{seed}", engines, *options))
                    say("trl", f"seed {seed}, {arm}: reward {runs[-1].rewards[-1]:.2f}")
            reloads = [loop.call(reload_s(engines.spec.url)) for _ in range(RELOADS)]
    except subprocess.TimeoutExpired as error:
        raise EngineStartError(str(error)) from error
    finally:
        loop.stop()
    found = summary(runs, reloads)
    result = {"summary": found, "unpacked": args.unpacked, "machine": machine(), "runs": runs}
    put_both(args.out, "trl", result, table(found))
    return int(not found["holds"])


if __name__ == "__main__":
    sys.exit(main())
