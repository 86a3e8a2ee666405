"""The stand-in for the driver's library, compiled."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("standin_libcuda.c")
NAME = "libcuda.so.1"


def build(folder: Path) -> dict[str, str]:
    """Compile it there, and return the environment of a process that is to find it."""
    compiler = shutil.which("cc") or pytest.skip("without a C compiler")
    try:
        ctypes.CDLL(NAME)
    except OSError:
        pass
    else:
        pytest.skip("a real driver is here: the tests run on it")
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{NAME}"]
    subprocess.run([compiler, *flags, "-o", str(folder / NAME), str(SOURCE)], check=True)
    return dict(os.environ) | {"LD_LIBRARY_PATH": str(folder)}
