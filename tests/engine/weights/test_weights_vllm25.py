"""Real vLLM 0.25: what holds on the pinned version holds there, by the same tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from vllm_versions import PYTHON_25, needs_25

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
# Loader trace and proof on 1 to 8 ranks; versions, probe, audit and plugins in a served engine.
FILES = ("test_weight_sharding.py", "test_weight_apply.py")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYTHON_25, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@needs_25
def test_it_is_the_version_that_fits_torch_2_11() -> None:
    program = "import vllm, torch; print(vllm.__version__, torch.__version__)"
    vllm, torch = run("-c", program).stdout.split()
    assert (vllm.split("+")[0], torch.split("+")[0]) == ("0.25.0", "2.11.0")


@needs_25
@pytest.mark.parametrize("file", FILES)
def test_all_that_holds_on_the_pinned_version_holds_there(file: str) -> None:
    options = ("-q", "-p", "no:cacheprovider", "--no-header", "--timeout=280")
    done = run("-m", "pytest", *options, str(Path(__file__).with_name(file)))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert "passed" in summary
    assert "skipped" not in summary
