"""Versions of trainers that were tested with ROSE; others are refused, since plugins use internals.

ROSE_UNTESTED=trl,verl     allow these, whatever their version
"""

import os
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from rose.errors import ConfigError

UNTESTED = "ROSE_UNTESTED"


def check_tested(package: str, tested: Sequence[str]) -> str:
    """Return the installed version of a trainer's package.

    Raises ConfigError if it is not in `tested`, unless ROSE_UNTESTED names the package.
    """
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
