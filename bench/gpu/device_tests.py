"""Piece `tests`: the tests that need a device, on the device."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.gpu.machine import ROOT
from bench.gpu.pieces import PieceError, Sizes, absent

NEVER_PASSED_ON = ("TRITON_INTERPRET",)
_UNIT, _CUDA = "tests/unit", ("cuda.bindings",)
_NATIVE = ("triton", "numba", "blake3", "zstandard", "cryptography")


@dataclass(frozen=True, slots=True)
class DeviceTestGroup:
    """Tests that run on a device where there is one, and on a stand-in elsewhere.

    Their files match the pattern and contain the word; modules: their imports.
    """

    name: str
    pattern: str
    word: str
    modules: tuple[str, ...]

    def files(self) -> list[Path]:
        found = sorted(ROOT.glob(self.pattern))
        return [file for file in found if self.word in file.read_text(encoding="utf-8")]

    def missing(self) -> str:
        """Return the reason why they cannot run, empty when they can."""
        if missing := absent(self.modules):
            return f"needs {', '.join(missing)}"
        return "" if self.files() else f"no {self.pattern} in this tree"


GROUPS = (
    DeviceTestGroup(
        "weights", f"{_UNIT}/*/kernels/device_cases*.py", "weight_transfer.kernels", _NATIVE
    ),
    DeviceTestGroup("pages", f"{_UNIT}/executor/gpu/test_cuda_*.py", "cuda_cases", _CUDA),
    DeviceTestGroup("memory", f"{_UNIT}/nvml/test_*.py", "NVML_DEVICE", (*_CUDA, "pynvml")),
)


def run(sizes: Sizes, place: str) -> dict[str, Any]:
    """Run all groups that can run; one test that fails or is skipped ends the piece."""
    return run_groups(GROUPS)


def run_groups(groups: Sequence[DeviceTestGroup]) -> dict[str, Any]:
    """Return tests passed and groups left out. Raises PieceError, also when all were left out."""
    left_out = {group.name: why for group in groups if (why := group.missing())}
    files = [file for group in groups if group.name not in left_out for file in group.files()]
    if not files:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise PieceError(f"no test can run here ({reasons})")
    return {**run_files(files), "left_out": left_out}


def run_files(files: Sequence[Path]) -> dict[str, Any]:
    """Return the number of tests that passed. Raises PieceError for any that did not."""
    kept = {name: value for name, value in os.environ.items() if name not in NEVER_PASSED_ON}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), kept.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory(prefix="rose-gpu-tests-") as scratch:
        report = Path(scratch) / "report.xml"
        # The project's own pytest options ask for plugins that no measuring machine needs.
        empty = Path(scratch) / "pytest.ini"
        empty.write_text("[pytest]\n", encoding="utf-8")
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(empty),
            "--rootdir", str(ROOT), "--junit-xml", str(report), *map(str, files),
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, env=kept, check=False)  # noqa: S603
        if not report.is_file():
            raise PieceError(f"pytest ended with {done.returncode} and no report; see the log")
        return {"files": [file.name for file in files], "passed": _passed(report)}


def _passed(report: Path) -> int:
    suites = list(ElementTree.parse(report).iter("testsuite"))  # noqa: S314 -- our own pytest's
    tests, skipped, *broken = (
        sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "skipped", "failures", "errors")
    )
    for case in (case for suite in suites for case in suite.iter("testcase")):
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                message = found.get("message", "").splitlines() or [kind]
                name = case.get("name")
                raise PieceError(f"{sum(broken)} of {tests} tests fail: {name}: {message[0]}")
    if skipped or not tests:
        raise PieceError(f"{skipped} of {tests} tests were skipped, which proves nothing")
    return tests
