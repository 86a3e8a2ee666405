"""Versions of trainers that were tried with ROSE: a plugin reaches into one, so it refuses others.

ROSE_UNTESTED=trl,verl     let these in, whatever their version
"""

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from rose.errors import ConfigError

UNTESTED = "ROSE_UNTESTED"


def check_tested(package: str, tested: Sequence[str]) -> str:
    """Return the installed version of a trainer. ConfigError where nobody tried it."""
    known = ", ".join(tested)
    try:
        found = version(package)
    except PackageNotFoundError as error:
        raise ConfigError(
            f"{package} is not installed; pip install 'rose-rollout[{package}]'"
        ) from error
    allowed = [each.strip() for each in os.environ.get(UNTESTED, "").split(",")]
    if found not in tested and package not in allowed:
        raise ConfigError(
            f"{package} {found} was never tried with ROSE, {known} was; install that, or set"
            f" {UNTESTED}={package} to try this one"
        )
    return found
