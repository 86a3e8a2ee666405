"""What wants a GPU, through cuda-bindings and a stand-in for the driver's library."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from standin_library import build

HERE = Path(__file__).parent
TESTS = ("driver", "mapping", "pages", "two_processes")


def test_bodies_for_a_device_hold_through_the_real_bindings(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="without cuda-bindings")
    environ = build(tmp_path)
    files = [str(HERE / f"test_cuda_{name}.py") for name in TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert int(re.findall(r"(\d+) passed", ran.stdout)[0]) > 50
    assert "skipped" not in ran.stdout
