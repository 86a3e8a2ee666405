"""Errors across `collective_rpc`: vLLM carries only an exception's text between its processes.

The worker names the error inside its text, the API process makes the typed error again, so that
an endpoint can tell a wrong base (409) from a failed proof (422).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from weight_transfer import errors
from weight_transfer.errors import WeightError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_MARK = re.compile(r"\[rose:(\w+)\] (.*)", re.DOTALL)


def names_errors(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Wrap a worker method: a WeightError that leaves it carries its own name in its text."""

    @functools.wraps(method)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except WeightError as error:
            raise type(error)(f"[rose:{type(error).__name__}] {error}") from error

    return wrapped


def typed(failure: Exception) -> Exception:
    """Return the WeightError that `failure` carried out of a worker, else `failure` itself."""
    marked = _MARK.search(str(failure))
    if marked is None:
        return failure
    kind = getattr(errors, marked.group(1), None)
    if not (isinstance(kind, type) and issubclass(kind, WeightError)):
        return failure
    return kind(marked.group(2))
