"""Errors of the rollout client.

RoseError
└── RolloutError
    ├── GatewayUnavailable        no answer, or "come back later", after all retries
    ├── VersionNotServed          no replica runs the policy version that was asked for
    └── RequestRefused            the request itself is wrong
"""

from rose.errors import RoseError


class RolloutError(RoseError):
    """A turn was not generated."""


class GatewayUnavailable(RolloutError):  # noqa: N818 - a state, as in the tree above
    """No answer after all retries: look at the gateway and its replicas."""


class VersionNotServed(RolloutError):  # noqa: N818 - a state, as in the tree above
    """No replica runs an acceptable policy version."""


class RequestRefused(RolloutError):  # noqa: N818 - a state, as in the tree above
    """The request is wrong: sending it again does not help."""
