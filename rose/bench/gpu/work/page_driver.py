"""The driver that the piece `pages` measures, opened in each of its processes."""

import importlib
from typing import cast

from executor.cuda.driver import Driver
from rose.bench.gpu.modules import absent

# `module:function` that opens the driver of the process's first GPU.
OPENER = "executor.cuda.bindings:open_driver"


def lacking() -> str:
    """Why pages cannot be moved, empty when they can."""
    return "needs the CUDA memory backend" if absent([OPENER.partition(":")[0]]) else ""


def opened(opener: str) -> Driver:
    """Return the driver that `module:function` opens in this process."""
    module, _, function = opener.partition(":")
    return cast("Driver", getattr(importlib.import_module(module), function)())
