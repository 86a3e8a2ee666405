"""Which modules this Python has, without importing them."""

from collections.abc import Iterable
from importlib.util import find_spec


def absent(names: Iterable[str]) -> list[str]:
    """Those of `names` that cannot be imported."""
    return [name for name in names if not _there(name)]


def _there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a package above it
        return False
