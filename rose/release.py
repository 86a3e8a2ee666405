"""Release of ROSE that this process is of, for people: nothing is decided by it."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

UNKNOWN = "unknown"


@cache
def release() -> str:
    """Version of the installed package; `unknown` where it runs from a folder."""
    try:
        return version("rose-rollout")
    except PackageNotFoundError:
        return UNKNOWN
