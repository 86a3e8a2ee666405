"""Release of ROSE that this process runs, for people; nothing is decided by it."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

UNKNOWN = "unknown"


@cache
def release() -> str:
    """Return the version of the installed package rose-rollout, from a cache; `unknown` if ROSE
    runs from a folder.
    """
    try:
        return version("rose-rollout")
    except PackageNotFoundError:
        return UNKNOWN
