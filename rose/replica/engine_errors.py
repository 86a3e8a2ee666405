"""What vLLM raises at a request, by the names that this version has for it.

0.25 has neither a common base nor errors that carry an HTTP status.
"""

from vllm import exceptions
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError


class _NeverRaisedError(Exception):
    """Stands where a version has no such error."""


def _known(name: str) -> type[Exception]:
    found: type[Exception] = getattr(exceptions, name, _NeverRaisedError)
    return found


ErrorWithStatus = _known("GracefulHTTPError")
"""Its `http_status` says what to answer."""
BAD_REQUESTS = (_known("VLLMClientError"), ValueError)
ENGINE_FAILURES = (_known("VLLMError"), EngineDeadError, EngineGenerateError)
