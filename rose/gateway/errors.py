"""Why a turn is not answered with tokens: each maps to one HTTP status.

RefusedError
└── TurnError
    ├── BadRequest             400
    ├── UnknownModel           404
    ├── VersionUnavailable     409
    ├── QueueFull              429, Retry-After
    └── NoReplica              503, Retry-After
"""

from rose.errors import RefusedError


class TurnError(RefusedError):
    """Base: `status` is the HTTP status, `kind` the error's type in the body."""

    status = 500
    kind = "internal"
    retry_after_s = 0


class BadRequest(TurnError):  # noqa: N818 - named as in HTTP
    """The request itself is wrong: sending it again will not help."""

    status = 400
    kind = "bad_request"


class UnknownModel(TurnError):  # noqa: N818 - a state, as in the tree above
    """The gateway serves another model."""

    status = 404
    kind = "unknown_model"


class VersionUnavailable(TurnError):  # noqa: N818 - a state, as in the tree above
    """No replica runs a policy version that the turn accepts."""

    status = 409
    kind = "version_unavailable"


class QueueFull(TurnError):  # noqa: N818 - a state, as in the tree above
    """Too many turns wait already."""

    status = 429
    kind = "queue_full"
    retry_after_s = 1


class NoReplica(TurnError):  # noqa: N818 - a state, as in the tree above
    """No replica could finish the turn in time."""

    status = 503
    kind = "no_replica"
    retry_after_s = 1
