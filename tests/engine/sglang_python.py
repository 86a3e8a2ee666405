"""Interpreter that has SGLang, whose pins clash with vLLM's: in an environment of its own.

ROSE_SGLANG_PYTHON names it; without that it is the one of `make install-sglang`, where it is.
"""

import os
from pathlib import Path

_MADE = Path(__file__).resolve().parents[2] / ".venv-sglang/bin/python"
PYTHON = os.environ.get("ROSE_SGLANG_PYTHON", str(_MADE) if _MADE.exists() else "")
MISSING = "make install-sglang, or name an interpreter with SGLang: ROSE_SGLANG_PYTHON"
