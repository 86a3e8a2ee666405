"""Releases of ROSE that processes of tests run: this tree, and 0.2.0 as its commit builds it.

A release is a folder in front of everything else on Python's path; the interpreter and all that
ROSE needs are those of the tests.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Its CHANGELOG says 0.2.0.
COMMIT_0_2_0 = "6c56153"


@dataclass(frozen=True, slots=True)
class Release:
    """One release; `path` holds its packages."""

    name: str
    path: Path

    def popen(self, *argv: str, log: Path) -> "subprocess.Popen[str]":
        """Start Python with these arguments; it speaks on pipes, and complains to `log`."""
        # From its own folder: `-m` looks where the process is before it looks anywhere else.
        with log.open("ab") as errors:
            return subprocess.Popen(
                [sys.executable, *argv],
                cwd=self.path,
                env={**os.environ, "PYTHONPATH": str(self.path)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )


HEAD = Release("head", ROOT)


def release_0_2_0() -> Release:
    """The wheel of 0.2.0, unpacked; skips the test where a shallow clone lacks its commit."""
    if _git("cat-file", "-e", f"{COMMIT_0_2_0}^{{commit}}").returncode:
        pytest.skip(f"this clone lacks {COMMIT_0_2_0}, release 0.2.0: `git fetch --unshallow`")
    folder = ROOT / "out" / "releases" / COMMIT_0_2_0
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            built = _built(Path(scratch))
            if not folder.exists():
                built.rename(folder)
    return Release("0.2.0", folder)


def _built(scratch: Path) -> Path:
    """Build the wheel of the commit, and unpack it."""
    source, wheels, unpacked = scratch / "source", scratch / "wheels", scratch / "unpacked"
    source.mkdir()
    archive = _git("archive", COMMIT_0_2_0, f"--output={scratch / 'source.tar'}")
    assert archive.returncode == 0, archive.stderr
    shutil.unpack_archive(scratch / "source.tar", source, filter="data")
    options = ("--quiet", "--no-deps", "--no-build-isolation", f"--wheel-dir={wheels}")
    _run("-m", "pip", "wheel", *options, str(source))
    (wheel,) = wheels.glob("rose_rollout-0.2.0-*.whl")
    shutil.unpack_archive(wheel, unpacked, "zip")
    return unpacked


def _run(*argv: str) -> None:
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def _git(*argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["git", "-C", str(ROOT), *argv], capture_output=True, text=True)


def program(name: str) -> Sequence[str]:
    """Arguments that run a program of ROSE's: all releases have the same."""
    return "-m", "rose.cli", name
