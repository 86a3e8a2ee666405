"""Where a benchmark's JSON goes, and the machine that it names."""

import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path


def put(found: Mapping[str, object], out: Path | None, *, indent: int, shown: bool) -> None:
    """Write it to a file, which may be in a new folder, and to standard output if `shown`."""
    text = json.dumps(found, indent=indent) + "\n"
    if shown:
        sys.stdout.write(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")


def machine_line() -> str:
    """Processor, cores and Python, in a line."""
    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.python_version()}"


def machine_now() -> dict[str, object]:
    """The same by name, and how loaded it is."""
    return {
        "python": platform.python_version(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
    }
