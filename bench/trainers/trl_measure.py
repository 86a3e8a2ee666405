"""`python -m bench.trainers.trl_measure`: TRL through ROSE beside TRL on a stock vLLM.

    seed 0:  server mode on ROSE without weight syncs, the same on a stock vLLM,
             server mode with them, AsyncGRPOTrainer
    seed 1:  …

Both engines are started once, with the same settings, and idle while the other one is asked. Steps
are compared without weight sync, since TRL's own needs CUDA: both arms train on rollouts of weights
that stay as they were, so their completions are as long. What learns is trained beside that. Its
syncs stand apart, beside a reload of the whole checkpoint by the stock engine; and so do its steps
less their syncs: a policy that learns answers at other lengths, and the replica is still busy with
the new weights when they begin. Writes trl.json, trl.txt and trl.png. Exit code 0, 1 when a limit
is missed, 2 for bad input or a bench that does not work.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import aiohttp
import matplotlib as mpl
from matplotlib.figure import Figure

from bench.common.checks import text_table
from bench.trainers.engines import UNPACKED, PairedEngines
from bench.trainers.policy import save_policy
from bench.trainers.stack import ROOT, run_program
from rose.client.blocking import LoopThread
from rose.compare.bootstrap import PairedWindow, ratio_of_percentiles
from rose.errors import ConfigError, EngineStartError, RoseError

PROGRAM = "bench.trainers.trl_run"
MOST_RATIO, MOST_DRIFT = 1.1, 0.01
# The first steps of a run warm caches up; so many steps are one unit of chance.
WARM, WINDOW = 2, 5
RELOADS = 5
ARMS = ("unsynced", "stock", "server", "async")
COLORS = {"server": "#2a7f9e", "async": "#e0a83a"}


@dataclass(frozen=True, slots=True)
class Run:
    """One training. step_s: of each step, without its weight sync; turns_s: of that, until its
    turns are there; drift: mean difference of the trainer's logprobs and the sampler's."""

    arm: str
    seed: int
    rewards: list[float]
    step_s: list[float]
    sync_s: list[float]
    drift: float | None
    turns_s: list[float]

    @property
    def learned(self) -> bool:
        """Whether the reward of its last third is above that of its first."""
        third = len(self.rewards) // 3
        return mean(self.rewards[-third:]) > mean(self.rewards[:third])


class Bench:
    """Both engines, and the trainings on them."""

    def __init__(
        self, folder: Path, python: Path, loop: LoopThread, tokens: int, *, unpacked: bool
    ) -> None:
        if not python.exists():
            raise ConfigError(f"there is no {python}; make it: scripts/trainer-env trl")
        self.folder, self._python, self._loop = folder, python, loop
        self._tokens = tokens
        (template,) = python.parents[1].glob("lib/*/site-packages/trl/chat_templates/qwen2_5.jinja")
        self.model = save_policy(folder / "model", template.read_text(encoding="utf-8"))
        self._engines = PairedEngines(folder, self.model, loop, unpacked=unpacked)

    def __enter__(self) -> "Bench":
        self._engines.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._engines.close()

    def train(self, arm: str, seed: int, steps: int) -> Run:
        """Train once. EngineStartError where the trainer fails."""
        folder = self.folder / f"{arm}-{seed}"
        folder.mkdir()
        argv = [str(self._python), "-m", PROGRAM, arm, f"--model={self.model}", f"--seed={seed}"]
        argv += [f"--steps={steps}", f"--folder={folder / 'saved'}", f"--out={folder / 'out'}"]
        argv += [f"--tokens={self._tokens}"]
        argv += [f"--url={self._engines.spec.url}"] if arm == "stock" else []
        environ = self._engines.stack.environ(root=folder / "published")
        code, said = run_program(argv, folder, environ)
        if code:
            last = said.splitlines()[-1]
            raise EngineStartError(f"{arm}, seed {seed} ended with {code}: {last}")
        return _read(folder / "out", arm, seed)

    def reloads(self) -> list[float]:
        """Seconds in which the stock engine reads its checkpoint anew, each time."""
        return [self._loop.call(self._reload()) for _ in range(RELOADS)]

    async def _reload(self) -> float:
        began_s = time.perf_counter()
        async with (
            aiohttp.ClientSession(self._engines.spec.url) as http,
            http.post("/collective_rpc", json={"method": "reload_weights"}) as answer,
        ):
            if answer.status != 200:
                raise EngineStartError(f"the stock engine reloads nothing: {await answer.text()}")
        return time.perf_counter() - began_s


def _read(out: Path, arm: str, seed: int) -> Run:
    rows: list[dict[str, Any]] = [json.loads(line) for line in out.read_text().splitlines()]
    steps = [row for row in rows if "step" in row]
    syncs = [row.get("perf/weight_sync_s") or row["sync_s"] for row in steps]
    drifts = [row.get("sampling/sampling_logp_difference/mean") for row in steps]
    found = [drift for drift in drifts if drift is not None]
    return Run(
        arm,
        seed,
        [row["reward"] for row in steps],
        [row.get("step_time", 0.0) - row["sync_s"] for row in steps],
        syncs,
        mean(found) if found else None,
        [row["turns_s"] for row in steps],
    )


def windows(rose: Run, stock: Run) -> list[PairedWindow]:
    """Steps of one seed, a few at a time."""
    firsts = range(WARM, len(rose.step_s) - WINDOW + 1, WINDOW)
    return [PairedWindow(rose.step_s[k : k + WINDOW], stock.step_s[k : k + WINDOW]) for k in firsts]


def summary(runs: Sequence[Run], reloads: Sequence[float]) -> dict[str, Any]:
    """All figures that have a limit, and those beside them."""
    by_arm = {arm: [run for run in runs if run.arm == arm] for arm in ARMS}
    pairs = [
        window
        for rose, stock in zip(by_arm["unsynced"], by_arm["stock"], strict=True)
        for window in windows(rose, stock)
    ]
    ratio = ratio_of_percentiles(pairs, 50, seed=0)
    syncs = [s for run in by_arm["server"] for s in run.sync_s[WARM:]]
    return {
        "step_ratio": ratio.value,
        "step_ratio_interval": ratio.ci95 and list(ratio.ci95),
        "step_s": {
            arm: median(s for run in by_arm[arm] for s in run.step_s[WARM:])
            for arm in ("unsynced", "stock", "server")
        },
        "turns_s": {
            arm: median(s for run in by_arm[arm] for s in run.turns_s[WARM:])
            for arm in ("unsynced", "stock", "server")
        },
        "sync_s": median(syncs),
        "reload_s": median(reloads),
        "drift": max(run.drift or 0.0 for run in by_arm["server"]),
        "learned": {
            arm: f"{sum(run.learned for run in by_arm[arm])} of {len(by_arm[arm])}"
            for arm in ("server", "async")
        },
        "holds": ratio.value <= MOST_RATIO
        and all(run.learned for run in runs if run.arm in COLORS)
        and all((run.drift or 0.0) <= MOST_DRIFT for run in by_arm["server"]),
    }


def table(found: dict[str, Any]) -> str:
    """The same for people."""
    interval = found["step_ratio_interval"]
    around = f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
    rows = [
        ("step without sync, ROSE", f"{found['step_s']['unsynced']:.3f} s", ""),
        ("step without sync, stock vLLM", f"{found['step_s']['stock']:.3f} s", ""),
        ("of it, turns, ROSE", f"{found['turns_s']['unsynced']:.3f} s", ""),
        ("of it, turns, stock vLLM", f"{found['turns_s']['stock']:.3f} s", ""),
        ("ratio of medians", f"{found['step_ratio']:.2f}{around}", f"<= {MOST_RATIO}"),
        ("step that learns, less its sync, ROSE", f"{found['step_s']['server']:.3f} s", ""),
        ("weight sync, served", f"{found['sync_s']:.3f} s", ""),
        ("reload of the checkpoint, stock vLLM", f"{found['reload_s']:.3f} s", ""),
        ("logprobs, trainer and sampler", f"{found['drift']:.4f}", f"<= {MOST_DRIFT}"),
        ("seeds that learned, server mode", found["learned"]["server"], "all"),
        ("seeds that learned, async", found["learned"]["async"], "all"),
    ]
    return text_table("TRL", ("figure", "value", "limit"), rows)


def draw(runs: Sequence[Run]) -> Figure:
    """Rewards by step, a line for each seed."""
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}):
        figure = Figure(figsize=(8, 3.2), layout="constrained")
        for axes, arm in zip(figure.subplots(1, 2, sharey=True), COLORS, strict=True):
            for run in (run for run in runs if run.arm == arm):
                axes.plot(range(1, len(run.rewards) + 1), run.rewards, color=COLORS[arm], lw=1)
            axes.set(title=f"TRL, {arm}", xlabel="step")
        figure.axes[0].set_ylabel("reward: share of letters")
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, keep it."""
    parser = argparse.ArgumentParser(prog="bench.trainers.trl_measure")
    parser.add_argument("--out", type=Path, default=Path("out/bench/trainers"), metavar="DIR")
    parser.add_argument("--python", type=Path, default=ROOT / ".venv-trl/bin/python")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=16, help="of a completion")
    parser.add_argument("--async-steps", type=int, default=30)
    parser.add_argument("--unpacked", action="store_true", help=UNPACKED)
    args = parser.parse_args(argv)
    loop, runs = LoopThread("rose-bench"), list[Run]()
    try:
        folder = Path(tempfile.mkdtemp(prefix="rose-trl-"))
        with Bench(folder, args.python, loop, args.tokens, unpacked=args.unpacked) as bench:
            for seed in range(args.seeds):
                for arm in ARMS:
                    count = args.async_steps if arm == "async" else args.steps
                    runs.append(bench.train(arm, seed, count))
                    sys.stderr.write(f"seed {seed}, {arm}: reward {runs[-1].rewards[-1]:.2f}\n")
            reloads = bench.reloads()
    except (RoseError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"trl: {error}\n")
        return 2
    finally:
        loop.stop()
    found = summary(runs, reloads)
    args.out.mkdir(parents=True, exist_ok=True)
    machine = {"cpus": os.cpu_count(), "kernel": platform.release()}
    kept = {"summary": found, "unpacked": args.unpacked, "machine": machine}
    kept["runs"] = [asdict(run) for run in runs]
    (args.out / "trl.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    (args.out / "trl.txt").write_text(table(found), encoding="utf-8")
    draw(runs).savefig(args.out / "trl.png", dpi=130)
    sys.stdout.write(table(found))
    return int(not found["holds"])


if __name__ == "__main__":
    sys.exit(main())
