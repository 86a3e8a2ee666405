"""The vLLM versions that engine tests run on: the installed one; nightly 0.25 where there is one.

0.25 pins another torch, so it lives in an environment of its own: ROSE_VLLM25_PYTHON names that
environment's interpreter. It needs ROSE's dependencies (the extra `replica`), not ROSE.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from rose.engines import module_path

PYTHON_25 = os.environ.get("ROSE_VLLM25_PYTHON", "")
needs_25 = pytest.mark.skipif(
    not PYTHON_25, reason="name an interpreter with vLLM 0.25: ROSE_VLLM25_PYTHON"
)
VERSIONS = [
    pytest.param(None, id="installed vLLM"),
    pytest.param(PYTHON_25, id="vLLM 0.25", marks=[needs_25, pytest.mark.nightly]),
]


def run_by(python: str | None, folder: Path) -> dict[str, Any]:
    """Fields of an EngineSpec that is run by this interpreter; None is this one."""
    if python is None:
        return {}
    path = module_path(folder / "metadata")
    return {"python": Path(python), "extra_env": {"PYTHONPATH": path}}
