"""GPU code through cuda-bindings and a stand-in for the driver's library."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.cuda.standin_library import build

pytestmark = [pytest.mark.engine, pytest.mark.starts_others]
CASES = Path(__file__).parents[2] / "unit" / "executor" / "gpu"
TESTS = ("pages", "two_processes")


def test_bodies_for_a_device_hold_through_the_real_bindings(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="without cuda-bindings")
    environ = build(tmp_path)
    files = [str(CASES / f"test_cuda_{name}.py") for name in TESTS]
    # The project's plugins, and no others: each takes time to import.
    plugins = ["-p", "pytest_timeout", "-p", "pytest_asyncio.plugin", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *files]
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert int(re.findall(r"(\d+) passed", ran.stdout)[0]) > 50
    assert "skipped" not in ran.stdout


BENCH = """
import json
from executor.cuda.driver import open_driver
from bench.gpu.pages import OPENER
from bench.gpu.pages import measure, measure_balloon
print(json.dumps([measure(OPENER, 3, 32 << 20), measure_balloon(open_driver(), 16, 3)]))
"""


def test_the_bench_of_pages_moves_them_between_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.driver", reason="without cuda-bindings")
    environ = build(tmp_path)
    command = [sys.executable, "-c", BENCH]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    pages, balloon = json.loads(ran.stdout)
    assert pages["pages"] == 16
    assert pages["by_handle"]["moved_s"]["count"] == 3
    assert balloon["returned"]["free_grew_by_bytes"] == balloon["pages"] * pages["page_bytes"]
    assert balloon["kept"]["free_grew_by_bytes"] == 0
    assert balloon["one_unmap_for_a_run"] is False
