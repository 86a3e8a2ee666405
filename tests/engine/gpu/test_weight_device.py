"""Kernels of devices, in processes of their own: Triton reads TRITON_INTERPRET when imported."""

import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.starts_others]
ROOT = Path(__file__).parents[3]
CASES = ROOT / "tests" / "unit" / "weight_transfer" / "kernels"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT), variables.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *command],
        env={**variables, "PYTHONPATH": path, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def cases(**environment: str) -> None:
    options = ("-q", "-p", "no:cacheprovider", "--no-header", "--timeout=300")
    # The project's plugins, and no others: each takes time to import.
    plugins = ("-p", "pytest_timeout", "-p", "pytest_asyncio.plugin")
    command = ("-m", "pytest", *plugins, *options, str(CASES / "device_cases.py"))
    done = run(*command, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", **environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert "passed" in summary
    assert "skipped" not in summary


@needs_triton
@pytest.mark.timeout(300)
def test_in_the_interpreter_every_kernel_gives_the_cpus_bits() -> None:
    cases(TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.timeout(300)
def test_on_a_gpu_every_kernel_gives_the_cpus_bits() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pytest.skip("no CUDA driver")
    if run("-c", "import torch, sys; sys.exit(not torch.cuda.is_available())").returncode:
        pytest.skip("no CUDA device")
    cases()


@needs_triton
@pytest.mark.timeout(300)
def test_every_kernel_compiles(tmp_path: Path) -> None:
    targets = ("80:1", "90:2", "90:8")
    script = str(CASES / "device_compiled.py")
    done = run("-W", "ignore", script, *targets, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    sizes = json.loads(done.stdout)
    assert len(sizes) == 8 * len(targets)
    assert all(sizes.values())


def test_who_has_no_device_imports_neither_torch_nor_triton() -> None:
    program = """
import sys
import numpy as np
import weight_transfer.format.tensors
from weight_transfer import digest_of, encode_chunk, TensorBits
old, new = (TensorBits("w", "bfloat16", (4,), np.full(4, n, "<u2")) for n in (1, 2))
encode_chunk(old, new, (0, 4), digest_of(old.bits))
assert not {"torch", "triton"} & sys.modules.keys(), sorted(sys.modules)
"""
    done = run("-c", program)
    assert done.returncode == 0, done.stderr[-2000:]
