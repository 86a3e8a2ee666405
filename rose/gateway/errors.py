"""Errors of a turn that is not answered with tokens: each maps to one HTTP status.

RefusedError
└── TurnError
    ├── BadRequest             400
    ├── Unauthorized           401, WWW-Authenticate
    ├── Forbidden              403
    ├── UnknownModel           404
    ├── UnknownJob             404
    ├── VersionUnavailable     409
    ├── TurnAborted            409
    ├── BodyTooSlow            408
    ├── BodyTooLarge           413
    ├── BodyEncoded            415
    ├── EnginesEnded           422
    ├── ImageMissing           428
    ├── QueueFull              429, Retry-After
    ├── NoReplica              503, Retry-After
    └── DeadlinePassed         504

A raised error references its frames, and they reference their waiters: kept anywhere in a turn it
makes a cycle of everything that the turn ever touched. So code that keeps an error keeps a `fresh`
one, which was never raised, and code that raises a kept one raises a `fresh` copy.
"""

from copy import copy
from typing import TypeVar

from rose.contract.replica import NO_IMAGE
from rose.errors import RefusedError

E = TypeVar("E", bound=BaseException)


def fresh(error: E) -> E:
    """Return a copy of the error without traceback, cause and context, so that keeping it keeps no
    frames alive.
    """
    return copy(error)


class TurnError(RefusedError):
    """Base of errors that answer a turn's request.

    status: HTTP status. kind: vLLM's name of it. param: the field at fault. retry_after_s: value of
    Retry-After, 0 for none.
    """

    status = 500
    kind = "InternalServerError"
    retry_after_s = 0

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class BadRequest(TurnError):  # noqa: N818 - named as in HTTP
    """Error 400: the request itself is wrong, so sending it again does not help."""

    status = 400
    kind = "BadRequestError"


class Unauthorized(TurnError):  # noqa: N818 - named as in HTTP
    """Error 401: the caller has not proved who it is."""

    status = 401
    kind = "AuthenticationError"


class Forbidden(TurnError):  # noqa: N818 - named as in HTTP
    """Error 403: the caller's certificate or token does not allow this request."""

    status = 403
    kind = "PermissionDeniedError"


class UnknownModel(TurnError):  # noqa: N818 - a state, as in the tree above
    """Error 404: the request names a model that the gateway does not serve."""

    status = 404
    kind = "NotFoundError"


class UnknownJob(TurnError):  # noqa: N818 - a state, as in the tree above
    """Error 404: the job is not registered with the scheduler."""

    status = 404
    kind = "NotFoundError"


class VersionUnavailable(TurnError):  # noqa: N818 - a state, as in the tree above
    """Error 409: no replica runs a policy version that the turn accepts."""

    status = 409
    kind = "ConflictError"


class TurnAborted(TurnError):  # noqa: N818 - a state, as in the tree above
    """Error 409: a caller aborted the turn by its id or finished its session."""

    status = 409
    kind = "ConflictError"


class BodyTooLarge(TurnError):  # noqa: N818 - a state, as in the tree above
    """Error 413: the body is longer than the gateway reads."""

    status = 413
    kind = "RequestEntityTooLargeError"


class BodyEncoded(TurnError):  # noqa: N818 - a state, as in the tree above
    """Error 415: the body is compressed, so a few bytes could become gigabytes."""

    status = 415
    kind = "UnsupportedMediaTypeError"


class EnginesEnded(TurnError):  # noqa: N818 - a state, as in the tree above
    """Error 422: several engines ended at this turn's prompt before its first token, so it is not
    sent to another one.
    """

    status = 422
    kind = "UnprocessableEntityError"


class ImageMissing(TurnError):  # noqa: N818 - a state, as in the tree above
    """Error 428: an image is named by its hash, and its bytes are not here."""

    status = NO_IMAGE
    kind = "PreconditionRequiredError"


class BodyTooSlow(TurnError):  # noqa: N818 - a state, as in the tree above
    """Error 408: the body did not come in time."""

    status = 408
    kind = "RequestTimeoutError"


class QueueFull(TurnError):  # noqa: N818 - a state, as in the tree above
    """Error 429: too many turns are waiting."""

    status = 429
    kind = "RateLimitError"
    retry_after_s = 1


class NoReplica(TurnError):  # noqa: N818 - a state, as in the tree above
    """Error 503: no replica could finish the turn in time."""

    status = 503
    kind = "ServiceUnavailableError"
    retry_after_s = 1


class DeadlinePassed(TurnError):  # noqa: N818 - a state, as in the tree above
    """Error 504: the turn took longer than its caller allowed."""

    status = 504
    kind = "GatewayTimeoutError"
