"""What tests of trainers share: a fleet, a policy, and the environment that a trainer has.

Trainers run in environments of their own, `scripts/trainer-env NAME` makes `.venv-NAME`; without it
the tests of that trainer are skipped. The fleet and these tests run in the project's.
"""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from rose.bench.trainers.policy import save_policy
from rose.bench.trainers.stack import JOB, NODE, QUIET, TrainerStack

__all__ = ["JOB", "NODE", "QUIET", "ROOT", "TrainerStack", "run_trainer", "save_policy", "venv"]

ROOT = Path(__file__).parents[2]


def venv(name: str) -> Path:
    """The interpreter of a trainer's environment; skips the test where it was not made."""
    python = ROOT / f".venv-{name}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f".venv-{name} is not there: scripts/trainer-env {name}")
    return python


def run_trainer(
    python: Path, program: Path, *argv: str, environ: Mapping[str, str], timeout_s: float
) -> "subprocess.CompletedProcess[str]":
    """Run a trainer's program to its end; what it printed."""
    path = os.pathsep.join([str(ROOT), str(program.parent)])
    return subprocess.run(
        [str(python), str(program), *argv],
        env={**environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
