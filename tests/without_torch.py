"""Leave out tests that import torch or vLLM: `pytest -p tests.without_torch`.

Whatever imports one of them, a file of tests or a test, is skipped where it does, so that nobody
has to keep a list. What is left needs neither, and no seconds to import them in each process.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

LEFT_OUT = {"torch", "transformers", "triton", "vllm"}


class Skipping:
    """A finder of modules that ends whoever imports one of them."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in LEFT_OUT:
            raise pytest.skip.Exception(f"needs {name}", allow_module_level=True)
        return None


sys.meta_path.insert(0, Skipping())
