"""The interpreter that has SGLang: a benchmark's engines of that kind run by it."""

from pathlib import Path
from typing import Final

from rose.errors import ConfigError

# Made by `make install-sglang`.
SGLANG_PYTHON: Final = Path(".venv-sglang/bin/python")


def check_sglang_python(python: Path) -> None:
    """Raise ConfigError where there is no such interpreter."""
    if not python.is_file():
        raise ConfigError(
            f"--sglang-python {python}: no such file; run `make install-sglang`, or name an"
            " interpreter that has SGLang"
        )
