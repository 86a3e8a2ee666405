"""One run of verl on this machine's CPUs, by the command of `examples/verl_grpo.sh`.

    python -m bench.trainers.verl_run [--mode sync|async] [--steps 12] [--seeds 3]

prints the figures of each run, on a fleet of its own, by the environment that
`scripts/trainer-env verl` makes. Everything that a run starts, Ray's processes too, inherits RUN,
by which its processes are found.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import psutil

from bench.common.processes import ROOT, BenchProcess
from bench.trainers.engines import thirds
from bench.trainers.policy import save_policy
from bench.trainers.stack import RUN_S, TrainerStack, trainer_python
from rose.errors import EngineStartError, UnavailableError

RUN = "ROSE_TEST_RUN"
SCRIPT = ROOT / "examples" / "verl_grpo.sh"
LINE = re.compile(r"step:(\d+) - (.*)")
FIGURE = re.compile(r"([\w/.@-]+):(?:np\.\w+\()?(-?[\d.]+(?:e[+-]?\d+)?)")
# Ray takes the machine's own address for 127.0.0.1, unless it knows that this is not a cluster.
RAY_ON_LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}
END_S, LOOK_S = 60.0, 0.1
ON_CPU = (
    "actor_rollout_ref.model.use_remove_padding=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "trainer.device=cpu",
    "+ray_kwargs.ray_init.num_gpus=1",
    "ray_kwargs.ray_init.num_cpus=16",
    "+ray_kwargs.ray_init.include_dashboard=False",
    "+ray_kwargs.ray_init.object_store_memory=200000000",
)
SHOWN = {
    "score": "critic/score/mean",
    "probs diff mean": "training/rollout_probs_diff_mean",
    "probs diff max": "training/rollout_probs_diff_max",
    "staleness max": "training/off_policy/trajectory_staleness/max",
    "step s": "timing_s/step",
    "gen s": "timing_s/gen",
    "actor s": "timing_s/update_actor",
    "weights s": "timing_s/update_weights",
}


class VerlRun:
    """One run of verl. Context manager: at its end nothing of it is left."""

    def __init__(
        self, stack: TrainerStack, python: Path, folder: Path, *more: str, **environ: str
    ) -> None:
        self.name = uuid.uuid4().hex
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / f"verl-{self.name[:8]}.log"
        # Ray puts sockets there, whose paths must be short.
        self._ray = Path(tempfile.mkdtemp(prefix="ray-"))
        argv = [
            *("bash", str(SCRIPT), str(stack.model), *ON_CPU),
            f"+ray_kwargs.ray_init._temp_dir={self._ray}",
            f"trainer.default_local_dir={folder / 'checkpoints'}",
            *more,
        ]
        environment = {
            **stack.environ(),
            "PATH": os.pathsep.join([str(python.parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "DATA": str(folder / "data"),
            "VERL_USE_EXTERNAL_MODULES": "bench.trainers.verl_cpu",
            "VERL_PLATFORM": "cpu",
            "VERL_ENGINE_DEVICE": "cuda",
            "RAY_DEDUP_LOGS": "0",
            **RAY_ON_LOOPBACK,
            RUN: self.name,
            **environ,
        }
        self.process = BenchProcess("verl", argv, self.log, env=environment, cwd=folder)

    def __enter__(self) -> Self:
        self.process.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._ray, ignore_errors=True)

    def finished(self, timeout_s: float) -> dict[int, dict[str, float]]:
        """Wait for its end; return figures of each step. EngineStartError where it failed."""
        code = self.process.popen.wait(timeout_s)
        if code:
            raise EngineStartError(f"verl ended with {code}: {self.output[-6_000:]}")
        return self.steps

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def steps(self) -> dict[int, dict[str, float]]:
        """Figures of each step that is over."""
        found = {}
        for line in LINE.finditer(self.output):
            figures = {name: float(value) for name, value in FIGURE.findall(line[2])}
            found[int(line[1])] = figures
        return found

    def until(self, holds: Callable[[], object], timeout_s: float, what: str) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            if not self.process.running or time.monotonic() > deadline_s:
                raise UnavailableError(f"no {what}: {self.output[-4_000:]}")
            time.sleep(LOOK_S)

    def members(self) -> list[psutil.Process]:
        """Return all processes that it started, Ray's too."""
        found = []
        for process in psutil.process_iter():
            try:
                lives = process.status() != psutil.STATUS_ZOMBIE
                if lives and process.environ().get(RUN) == self.name:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def kill(self) -> None:
        deadline_s = time.monotonic() + END_S
        while members := self.members():
            for process in members:
                try:
                    process.send_signal(signal.SIGKILL)
                except psutil.Error:
                    continue
            psutil.wait_procs(members, timeout=5.0)
            if time.monotonic() > deadline_s:
                raise UnavailableError(f"{len(members)} processes of verl do not end")
        self.process.kill()


def train_verl(
    stack: TrainerStack, python: Path, folder: Path, mode: str, seed: int, steps: int
) -> list[dict[str, float]]:
    """Return the figures of each step of a run of its own, on replicas that served one before."""
    environ = {"STEPS": str(steps), "MODE": mode, "SEED": str(seed)}
    environ |= {"ROSE_ROOT": str(folder / "published"), "ROSE_TAKE_OVER": "1"}
    with VerlRun(stack, python, folder, **environ) as run:
        try:
            found = run.finished(RUN_S)
        except subprocess.TimeoutExpired as error:
            raise EngineStartError(str(error)) from error
    return [found[number] for number in sorted(found)]


def main() -> int:
    """Run verl once for each seed, and print a row for each run."""
    parser = argparse.ArgumentParser(prog="bench.trainers.verl_run")
    parser.add_argument("--mode", choices=["sync", "async"], default="sync")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    python = trainer_python("verl")
    with tempfile.TemporaryDirectory(prefix="rose-verl-") as name:
        folder = Path(name)
        with TrainerStack(folder / "stack", save_policy(folder / "model")) as stack:
            stack.wait_ready()
            for seed in range(args.seeds):
                began_s = time.monotonic()
                run = folder / f"run-{seed}"
                steps = train_verl(stack, python, run, args.mode, seed, args.steps)
                took_s = time.monotonic() - began_s
                line = f"seed {seed}: {len(steps)} steps in {took_s:.0f} s, Ray's start included"
                sys.stdout.write("\n".join([line, *summary(steps), ""]))
                sys.stdout.flush()
    return 0


def summary(steps: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Return the mean of each figure over the first third of the steps, and over the last."""
    for shown, name in SHOWN.items():
        values = [row[name] for row in steps if name in row]
        if values:
            first, last = thirds(values)
            yield f"  {shown:16} first third {first:.5g}, last third {last:.5g}"


if __name__ == "__main__":
    sys.exit(main())
