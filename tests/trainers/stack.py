"""Shared parts of the tests of trainers: a fleet, a policy, and a trainer's environment.

Trainers run in environments of their own, `scripts/trainer-env NAME` makes `.venv-NAME`; without it
the tests of that trainer are skipped. The fleet and these tests run in the project's.
"""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from bench.trainers.policy import save_policy
from bench.trainers.stack import JOB, NODE, QUIET, TrainerStack

__all__ = ["JOB", "NODE", "QUIET", "ROOT", "TrainerStack", "save_policy", "spawn_trainer", "venv"]

ROOT = Path(__file__).parents[2]


def venv(name: str) -> Path:
    """The interpreter of a trainer's environment; skips the test where it was not made."""
    python = ROOT / f".venv-{name}" / "bin" / "python"
    if not python.exists():
        pytest.skip(f".venv-{name} is not there: scripts/trainer-env {name}")
    return python


def spawn_trainer(
    python: Path, module: str, *argv: str, environ: Mapping[str, str], log: Path
) -> "subprocess.Popen[bytes]":
    """Start a trainer's program; what it says goes to `log`."""
    with log.open("ab") as said:
        return subprocess.Popen(
            [str(python), "-m", module, *argv],
            cwd=log.parent,
            env={**environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
